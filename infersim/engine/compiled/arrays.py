"""How compiled code sees state.ARRAYS: the entry has one pointer, to a state.CALL, and makes a named tuple of it.

The tuple has `call`, the record itself, and every array by its name. It is made once: functions that look arrays up
through the pointer each time compile to less text, but runs were 10 to 20 % slower.
"""

from collections import namedtuple

from numba import from_dtype, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy import dtype

from . import state

Arrays = namedtuple("Arrays", ["call", *state.ARRAYS])
CALL = from_dtype(state.CALL)
TYPES = {
    name: types.Array(from_dtype(dtype(element)), len(shape), "C") for name, (element, shape) in state.ARRAYS.items()
}
TUPLE = types.NamedTuple([CALL, *TYPES.values()], Arrays)


def _array(context, builder, pointer, index, name):
    """The array `name`, whose address and sizes are in the state.CALL at `pointer`."""

    def constant(value):
        return context.get_constant(types.int64, value)

    def load(field, place=0):
        address = builder.gep(pointer, [constant(CALL.offset(field) + 8 * place)])
        return builder.load(builder.bitcast(address, context.get_value_type(types.int64).as_pointer()))

    array = context.make_array(TYPES[name])(context, builder)
    element, sizes = state.ARRAYS[name]
    shape = [constant(size) if isinstance(size, int) else load(size) for size in sizes]
    strides = [constant(dtype(element).itemsize)]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    data = builder.inttoptr(load("addresses", index), array.data.type)
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=strides[-1], meminfo=None)
    return array._getvalue()


@intrinsic
def arrays_of(_, pointer):
    """Arrays of the state.CALL at an address."""

    def codegen(context, builder, signature, arguments):
        arrays = [_array(context, builder, arguments[0], i, name) for i, name in enumerate(state.ARRAYS)]
        call = builder.bitcast(arguments[0], context.get_value_type(CALL))
        return context.make_tuple(builder, TUPLE, [call, *arrays])

    return TUPLE(pointer), codegen
