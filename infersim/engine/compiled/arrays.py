"""How compiled code sees state.ARRAYS: one pointer, to a state.CALL, whose attributes are the arrays and `call` itself.

An array as an argument is some seven words, and thirty of them make most of the text that LLVM has to read. A
pointer is one, and a function takes from it what it uses.
"""

from numba import from_dtype, types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, lower_getattr_generic, models, register_model
from numba.np.arrayobj import populate_array
from numpy import dtype

from . import state

NAMES = list(state.ARRAYS)


class ArraysType(types.Type):
    """All arrays of a fleet."""

    def __init__(self) -> None:
        super().__init__(name="Arrays")


ARRAYS = ArraysType()
CALL = from_dtype(state.CALL)
TYPES = {
    name: types.Array(from_dtype(dtype(element)), len(shape), "C") for name, (element, shape) in state.ARRAYS.items()
}
register_model(ArraysType)(models.OpaqueModel)


@infer_getattr
class ArraysAttribute(AttributeTemplate):
    """The types of the attributes."""

    key = ArraysType

    def generic_resolve(self, typ, name):
        return CALL if name == "call" else TYPES.get(name)


@lower_getattr_generic(ArraysType)
def get_array(context, builder, typ, pointer, name):
    """The array `name`, or the call. Sizes and addresses do not change while compiled code runs: LLVM may keep them."""
    if name == "call":
        return builder.bitcast(pointer, context.get_value_type(CALL))
    word = context.get_value_type(types.int64)

    def constant(value):
        return context.get_constant(types.int64, value)

    def load(field, index=0):
        place = builder.gep(pointer, [constant(CALL.offset(field) + 8 * index)])
        value = builder.load(builder.bitcast(place, word.as_pointer()))
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value

    array = context.make_array(TYPES[name])(context, builder)
    shape = [constant(size) if isinstance(size, int) else load(size) for size in state.ARRAYS[name][1]]
    item = constant(dtype(state.ARRAYS[name][0]).itemsize)
    strides = [item]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    data = builder.inttoptr(load("addresses", NAMES.index(name)), array.data.type)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=item, meminfo=None)
    return array._getvalue()
