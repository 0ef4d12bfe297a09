"""The program in a file of `torch.save`: what it builds, found out without unpickling and without torch.

`data.pkl` is a program for pickle's stack machine (its instructions: `pickletools` of the standard library). Python's
own machine imports what the program names and calls it with what the program likes. This one has plain values,
containers and tensors alone: a name stays a name, and of the calls those in `_CALLS` are carried out, all else is
refused. Tensors come as where they lie in the file; `torch_file` reads their bytes.
"""

from __future__ import annotations

import codecs
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class RefusedProgram(ValueError):
    """The program wants something that is no plain value and no tensor."""


class BrokenProgram(ValueError):
    """The program makes no sense: it was cut off, or damaged."""


class GlobalName(NamedTuple):
    """Something that the program names, as it stands there."""

    module: str
    name: str


class Stored(NamedTuple):
    """A storage: the archive's record `data/KEY`, and the dtype of its elements ("" where it is bytes alone)."""

    key: str
    dtype: str


class StridedTensor(NamedTuple):
    """A tensor as it lies in a storage: offset and strides are in elements."""

    storage: Stored
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


#: A tensor takes about forty; each may make a value of 200 bytes.
_MOST_INSTRUCTIONS = 1 << 22

#: torch's classes of storages -> the dtypes of their elements.
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "UntypedStorage": "",
}  # fmt: skip


def built(program: bytes) -> object:
    """What the program builds. RefusedProgram, BrokenProgram."""
    try:
        return _Machine().run(program)
    except RefusedProgram:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BrokenProgram(str(error) or type(error).__name__) from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> object:
        """The top of the stack at the end."""
        for count, (instruction, argument, _) in enumerate(pickletools.genops(program)):
            if count == _MOST_INSTRUCTIONS:
                raise BrokenProgram(f"it has more than {_MOST_INSTRUCTIONS} instructions")
            name = instruction.name
            if name == "STOP":
                return self.stack.pop()
            if name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name]())
            elif name in _LITERALS:
                self.stack.append(argument)
            elif (act := _ACTIONS.get(name)) is not None:
                act(self, argument)
            else:
                raise RefusedProgram(name)
        raise BrokenProgram("it has no end")

    def since_mark(self) -> list[Any]:
        """What was pushed since the last mark, taken off."""
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def pushed(self, value: Any) -> None:
        self.stack.append(value)

    def name(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self.pushed(GlobalName(module, name))

    def name_from_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise BrokenProgram("a name that is no text")
        self.pushed(GlobalName(module, name))

    def tuple_of(self, count: int) -> None:
        taken = tuple(self.stack[len(self.stack) - count :])
        if len(taken) != count:
            raise BrokenProgram("its stack runs out")
        del self.stack[len(self.stack) - count :]
        self.pushed(taken)

    def append(self, values: list[Any]) -> None:
        _of(list, self.stack[-1]).extend(values)

    def add(self, values: list[Any]) -> None:
        _of(set, self.stack[-1]).update(values)

    def set_items(self, values: list[Any]) -> None:
        _of(dict, self.stack[-1]).update(zip(values[::2], values[1::2], strict=True))

    def dictionary(self, _: Any) -> None:
        items = self.since_mark()
        self.pushed({})
        self.set_items(items)

    def persistent(self, _: Any) -> None:
        kind, named, key, *_rest = self.stack.pop()
        if kind != "storage" or not isinstance(named, GlobalName) or named.name not in _STORAGES:
            raise RefusedProgram(f"a storage of {named}")
        self.pushed(Stored(str(key), _STORAGES[named.name]))

    def call(self, _: Any) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, GlobalName) or called not in _CALLS:
            raise RefusedProgram(
                f"a call of {'.'.join(called) if isinstance(called, GlobalName) else 'a value'}"
            )
        self.pushed(_CALLS[called](*arguments))

    def build(self, _: Any) -> None:
        """Attributes of what lies below: only an ordered dictionary has some, which nobody here asks for."""
        self.stack.pop()
        _of(dict, self.stack[-1])


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise RefusedProgram(f"a change of a {type(value).__name__}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(one) is int and one >= 0 for one in values):
        raise BrokenProgram("a shape that is none")
    return values


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any = None, _hooks: Any = None,
    dtype: Any = None, _metadata: Any = None,
) -> StridedTensor:  # fmt: skip
    """torch._utils._rebuild_tensor_v2, and _v3, which names the dtype that its storage does not."""
    if not isinstance(storage, Stored):
        raise BrokenProgram("a tensor without a storage")
    (offset,) = _sizes((offset,))
    shape, strides = _sizes(shape), _sizes(strides)
    if len(shape) != len(strides):
        raise BrokenProgram("a tensor with other strides than dimensions")
    named = dtype.name if isinstance(dtype, GlobalName) and dtype.module == "torch" else storage.dtype
    return StridedTensor(storage, named, offset, shape, strides)


def _parameter(tensor: Any, *_: Any) -> StridedTensor:
    found: StridedTensor = _of(StridedTensor, tensor)
    return found


def _subclass(function: Any, kind: Any, arguments: Any, _state: Any) -> StridedTensor:
    """A tensor with attributes, or a parameter that has been changed: the tensor."""
    if function not in _CALLS or kind not in (
        GlobalName("torch", "Tensor"),
        GlobalName("torch.nn.parameter", "Parameter"),
    ):
        raise RefusedProgram(f"a tensor of {kind}")
    return _parameter(_CALLS[function](*arguments))


def _dictionary(items: Any = ()) -> dict[Any, Any]:
    return dict(items)


def _encoded(text: Any, encoding: Any) -> bytes:
    """Bytes, as protocol 2 has them: text in Latin-1."""
    if not isinstance(text, str) or encoding != "latin1":
        raise RefusedProgram(f"text in {encoding}")
    return codecs.encode(text, "latin1")


#: What the program may call.
_CALLS: Mapping[Any, Callable[..., Any]] = {
    GlobalName("torch._utils", "_rebuild_tensor_v2"): _tensor,
    GlobalName("torch._utils", "_rebuild_tensor_v3"): _tensor,
    GlobalName("torch._utils", "_rebuild_parameter"): _parameter,
    GlobalName("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    GlobalName("torch._tensor", "_rebuild_from_type_v2"): _subclass,
    GlobalName("collections", "OrderedDict"): _dictionary,
    GlobalName("torch", "Size"): _sizes,
    GlobalName("torch", "device"): lambda *words: ":".join(map(str, words)),
    GlobalName("_codecs", "encode"): _encoded,
    GlobalName("__builtin__", "set"): set,
    GlobalName("builtins", "set"): set,
}

_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_LITERALS = frozenset((
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
))  # fmt: skip
_ACTIONS: Mapping[str, Callable[[_Machine, Any], object]] = {
    "PROTO": lambda m, a: None,
    "FRAME": lambda m, a: None,
    "MARK": lambda m, a: m.marks.append(len(m.stack)),
    "POP": lambda m, a: m.stack.pop(),
    "POP_MARK": lambda m, a: m.since_mark(),
    "DUP": lambda m, a: m.pushed(m.stack[-1]),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "PUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "LONG_BINPUT": lambda m, a: m.memo.__setitem__(a, m.stack[-1]),
    "MEMOIZE": lambda m, a: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    "GET": lambda m, a: m.pushed(m.memo[a]),
    "BINGET": lambda m, a: m.pushed(m.memo[a]),
    "LONG_BINGET": lambda m, a: m.pushed(m.memo[a]),
    "TUPLE": lambda m, a: m.pushed(tuple(m.since_mark())),
    "TUPLE1": lambda m, a: m.tuple_of(1),
    "TUPLE2": lambda m, a: m.tuple_of(2),
    "TUPLE3": lambda m, a: m.tuple_of(3),
    "LIST": lambda m, a: m.pushed(m.since_mark()),
    "DICT": _Machine.dictionary,
    "APPEND": lambda m, a: m.append([m.stack.pop()]),
    "APPENDS": lambda m, a: m.append(m.since_mark()),
    "ADDITEMS": lambda m, a: m.add(m.since_mark()),
    "SETITEM": lambda m, a: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, a: m.set_items(m.since_mark()),
    "BINPERSID": _Machine.persistent,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}
