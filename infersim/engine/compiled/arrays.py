"""How compiled code sees interface.ARRAYS: all of them through the address of a interface.CALL, or those of one rank.

Rows and arrays have types of their own, since Numba's say more than is needed: an array of its is seven words or more
as an argument, any index may count from the end, and each width of an integer compiles its callee again. Here an array
is an address and its lengths, every integer read is 64 bits wide, and LLVM is told what cannot change or overlap.
"""

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    lower_setattr_generic,
    models,
    register_model,
)
from numba.np.numpy_support import from_dtype

from . import interface, state
from .njit import BOUNDS_CHECKED

WORD = ir.IntType(64)
BYTE = ir.IntType(8)
NAMES = {id(value): name for name, value in (vars(state) | vars(interface)).items() if isinstance(value, np.dtype)}
CONSTANT = {"KNOBS", "PRICE", "ATTENTION_PRICE", "SEGMENT"}
"""rows that compiled code only reads"""


class Row(types.Type):
    """One row of an array of records: its address."""

    def __init__(self, record):
        self.name_of, self.record = NAMES[id(record)], record
        super().__init__(name=f"Row({self.name_of})")


class Rows(types.Type):
    """An array in C order, of records or numbers. With fewer indices than dimensions it is the Rows that lie there."""

    def __init__(self, element, ndim):
        self.element, self.ndim = np.dtype(element), ndim
        self.name_of = NAMES.get(id(element)) or self.element.str[1:]
        super().__init__(name=f"Rows({self.name_of}, {ndim})")


@register_model(Row)
class RowModel(models.OpaqueModel):
    pass


@register_model(Rows)
class RowsModel(models.StructModel):
    def __init__(self, manager, rows):
        lengths = [(f"length{i}", types.int64) for i in range(rows.ndim)]
        super().__init__(manager, rows, [("data", types.voidptr), *lengths])


def type_of(element, ndim):
    """What reading so many dimensions of a numpy dtype is; every signed integer is 64 bits wide."""
    if ndim > 0:
        return Rows(element, ndim)
    if element.names:
        return Row(element)
    return types.int64 if element.kind == "i" else from_dtype(element)


# --- places in memory -------------------------------------------------------------------------------------------------
def _gep(builder, address, offset):
    return builder.gep(address, [offset if isinstance(offset, ir.Value) else ir.Constant(WORD, offset)])


def _mark(builder, instruction, kind, constant):
    """Tell LLVM that places of different kinds do not overlap (TBAA), and what never changes."""
    module = builder.module
    root = module.add_metadata(["infersim"])
    leaf = module.add_metadata([kind, root, ir.Constant(WORD, 0)])
    instruction.set_metadata("tbaa", module.add_metadata([leaf, leaf, ir.Constant(WORD, 0)]))
    if constant:
        instruction.set_metadata("invariant.load", module.add_metadata([]))


def _load(context, builder, element, address, kind, constant=False):
    stored = from_dtype(element)
    value = builder.load(builder.bitcast(address, context.get_data_type(stored).as_pointer()))
    _mark(builder, value, kind, constant)
    return context.cast(
        builder, context.data_model_manager[stored].from_data(builder, value), stored, type_of(element, 0)
    )


def _store(context, builder, element, address, kind, given, value):
    stored = from_dtype(element)
    value = context.data_model_manager[stored].as_data(builder, context.cast(builder, value, given, stored))
    _mark(builder, builder.store(value, builder.bitcast(address, value.type.as_pointer())), kind, False)


def make_rows(context, builder, rows, address, lengths):
    value = cgutils.create_struct_proxy(rows)(context, builder)
    value.data = address
    for i, length in enumerate(lengths):
        setattr(value, f"length{i}", length)
    return value._getvalue()


# --- fields of a row --------------------------------------------------------------------------------------------------
@infer_getattr
class Fields(AttributeTemplate):
    key = Row

    def generic_resolve(self, row, name):
        if name in row.record.fields:
            field = row.record.fields[name][0]
            return type_of(field.base, len(field.shape))


@lower_getattr_generic(Row)
def get_field(context, builder, row, address, name):
    field, offset = row.record.fields[name][:2]
    address = _gep(builder, address, offset)
    if field.shape:
        lengths = [ir.Constant(WORD, length) for length in field.shape]
        return make_rows(context, builder, type_of(field.base, len(field.shape)), address, lengths)
    return _load(context, builder, field, address, f"{row.name_of}.{name}", row.name_of in CONSTANT)


@lower_setattr_generic(Row)
def set_field(context, builder, signature, arguments, name):
    row, given = signature.args
    field, offset = row.record.fields[name][:2]
    address = _gep(builder, arguments[0], offset)
    _store(context, builder, field, address, f"{row.name_of}.{name}", given, arguments[1])


# --- elements of an array ---------------------------------------------------------------------------------------------
def _inner(rows, index):
    """Type of what an index of integers leads to, None if it is no such index."""
    indices = index.types if isinstance(index, types.BaseTuple) else (index,)
    if all(isinstance(i, types.Integer) for i in indices) and len(indices) <= rows.ndim:
        return type_of(rows.element, rows.ndim - len(indices))


@infer_global(operator.getitem)
class GetItem(AbstractTemplate):
    def generic(self, arguments, keywords):
        rows, index = arguments
        inner = _inner(rows, index) if isinstance(rows, Rows) else None
        return inner and signature(inner, rows, index)


@infer_global(operator.setitem)
class SetItem(AbstractTemplate):
    def generic(self, arguments, keywords):
        rows, index, value = arguments
        if isinstance(rows, Rows) and isinstance(_inner(rows, index), types.Number):
            return signature(types.none, rows, index, value)


@infer_global(len)
class Length(AbstractTemplate):
    def generic(self, arguments, keywords):
        if isinstance(arguments[0], Rows):
            return signature(types.intp, arguments[0])


def _place(context, builder, signature, arguments):
    """Address of what an index leads to, and how long that is in the dimensions that are left."""
    rows, kind = signature.args[:2]
    value = cgutils.create_struct_proxy(rows)(context, builder, value=arguments[0])
    kinds, indices = (kind,), (arguments[1],)
    if isinstance(kind, types.BaseTuple):
        kinds, indices = kind.types, cgutils.unpack_tuple(builder, arguments[1], len(kind))
    lengths = [getattr(value, f"length{i}") for i in range(rows.ndim)]
    place = ir.Constant(WORD, 0)
    for i, length in enumerate(lengths):
        place = builder.mul(place, length) if i > 0 else place
        if i < len(indices):
            index = context.cast(builder, indices[i], kinds[i], types.int64)
            if BOUNDS_CHECKED:
                with builder.if_then(builder.icmp_unsigned(">=", index, length), likely=False):
                    trap = builder.module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), ()))
                    builder.call(trap, ())
            place = builder.add(place, index) if i > 0 else index
    size = ir.Constant(WORD, rows.element.itemsize)
    return _gep(builder, value.data, builder.mul(place, size)), lengths[len(indices) :]


@lower_builtin(operator.getitem, Rows, types.Any)
def get_item(context, builder, signature, arguments):
    rows = signature.args[0]
    address, lengths = _place(context, builder, signature, arguments)
    if lengths:
        return make_rows(context, builder, signature.return_type, address, lengths)
    return address if rows.element.names else _load(context, builder, rows.element, address, rows.name_of)


@lower_builtin(operator.setitem, Rows, types.Any, types.Any)
def set_item(context, builder, signature, arguments):
    rows, _, given = signature.args
    address, _ = _place(context, builder, signature, arguments)
    _store(context, builder, rows.element, address, rows.name_of, given, arguments[2])
    return context.get_dummy_value()


@lower_builtin(len, Rows)
def length(context, builder, signature, arguments):
    return cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0]).length0


# --- all of them, and those of one rank -------------------------------------------------------------------------------
class Arrays(types.Type):
    """interface.ARRAYS by name, and `call`, through the address of the interface.CALL that knows where they are."""

    def __init__(self):
        super().__init__(name="Arrays")


class Core(types.Type):
    """What the scheduler of one rank works on: its part of interface.ARRAYS, as CORE has it; vLLM's EngineCore.

    running: i4[max_num_seqs], request rows in order of admission; step: i4[max_num_seqs], the step being made: a
    request row if it samples a token, else its bitwise complement; tokens: i8[max_num_seqs], of each (entries.py).
    """

    def __init__(self):
        super().__init__(name="Core")


ARRAYS, CORE_TYPE = Arrays(), Core()
CORE = {
    "requests": ("requests",),
    "segments": ("segments",),
    "sequences": ("sequences",),
    "replica": ("replicas", "replica"),
    "knobs": ("knobs", "replica"),
    "price": ("prices", "replica"),
    "plan": ("plan", "replica"),
    "attention": ("attention", "replica"),
    "scheduler": ("schedulers", "rank"),
    "sums": ("sums", "rank"),
    "running": ("running", "rank"),
    "blocks": ("blocks", "rank"),
    "tables": ("tables", "rank"),
    "nodes": ("nodes", "rank"),
    "steps": ("steps", "rank"),
    "counts": ("counts", "rank"),
    "step": ("steps", "rank", "slot"),
    "tokens": ("tokens", "rank", "slot"),
}
"""where in interface.ARRAYS: name, and what it is indexed with"""


@register_model(Arrays)
class ArraysModel(models.OpaqueModel):
    pass


@register_model(Core)
class CoreModel(models.StructModel):
    def __init__(self, manager, core):
        members = [(name, types.int64) for name in ("replica", "rank", "slot")]
        super().__init__(manager, core, [("arrays", types.voidptr), *members])


@infer_getattr
class ArraysFields(AttributeTemplate):
    key = Arrays

    def generic_resolve(self, arrays, name):
        if name in interface.ARRAYS:
            element, shape = interface.ARRAYS[name]
            return Rows(element, len(shape))
        return Row(interface.CALL) if name == "call" else None


@infer_getattr
class CoreFields(AttributeTemplate):
    key = Core

    def generic_resolve(self, core, name):
        if name in CORE:
            array, *indices = CORE[name]
            element, shape = interface.ARRAYS[array]
            return type_of(np.dtype(element) if isinstance(element, str) else element, len(shape) - len(indices))


@lower_getattr_generic(Arrays)
def get_array(context, builder, arrays, call, name):
    if name == "call":
        return call

    def load(field, place=0):
        address = _gep(builder, call, interface.CALL.fields[field][1] + 8 * place)
        value = builder.load(builder.bitcast(address, WORD.as_pointer()))
        _mark(builder, value, f"CALL.{field}", True)
        return value

    element, shape = interface.ARRAYS[name]
    data = builder.inttoptr(load("addresses", list(interface.ARRAYS).index(name)), BYTE.as_pointer())
    lengths = [ir.Constant(WORD, size) if isinstance(size, int) else load(size) for size in shape]
    return make_rows(context, builder, Rows(element, len(shape)), data, lengths)


@lower_getattr_generic(Core)
def get_part(context, builder, core, value, name):
    value = cgutils.create_struct_proxy(core)(context, builder, value=value)
    array, *names = CORE[name]
    element, shape = interface.ARRAYS[array]
    rows = get_array(context, builder, ARRAYS, value.arrays, array)
    if not names:
        return rows
    indices = context.make_tuple(builder, types.UniTuple(types.int64, len(names)), [getattr(value, n) for n in names])
    kinds = (Rows(element, len(shape)), types.UniTuple(types.int64, len(names)))
    inner = CoreFields(None).generic_resolve(core, name)
    return get_item(context, builder, signature(inner, *kinds), (rows, indices))


@intrinsic
def arrays_of(_, address):
    """Arrays of the interface.CALL at an address."""
    return ARRAYS(address), lambda context, builder, signature, arguments: arguments[0]


@intrinsic
def core_of(_, arrays, replica, rank, slot):
    """Core of one rank of a replica, whose step in flight is `slot`."""

    def codegen(context, builder, signature, arguments):
        core = cgutils.create_struct_proxy(CORE_TYPE)(context, builder)
        core.arrays = arguments[0]
        for name, kind, value in zip(("replica", "rank", "slot"), signature.args[1:], arguments[1:], strict=True):
            setattr(core, name, context.cast(builder, value, kind, types.int64))
        return core._getvalue()

    return CORE_TYPE(arrays, replica, rank, slot), codegen
