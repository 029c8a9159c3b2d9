"""What a Python function does, as a key: equal keys mean equal code over equal values, to any depth.

A key holds the function's code and that of the functions and classes that it names, its defaults, what it closes over
and what it is bound to. Objects are taken apart as `copy` does it (`__reduce_ex__`), so a method of a string, a regular
expression, a `functools.partial` or a dataclass has a key of its own. Code of installed libraries counts by its name.

What cannot be taken apart, such as an open file or a lock, has no key: the caller then knows of two functions only that
they may differ.
"""

from __future__ import annotations

import dis
import hashlib
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from copyreg import dispatch_table
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any, Final

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_MOST_OBJECTS: Final = 100_000
_NO_BEHAVIOUR: Final = frozenset(
    (
        "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__firstlineno__",
        "__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl",
    )
)  # fmt: skip
"""Members of a class that say nothing of what it does; in some the order changes from process to process."""
_NAMES: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})


class _NoKeyError(Exception):
    """A value that cannot be taken apart."""


def value_key(value: Any) -> str | None:
    """A key of a value or a function, the same in every process; None if there is none."""
    try:
        return _Walk().key(value)
    except (_NoKeyError, RecursionError):
        return None


class _Walk:
    """One walk through a value. Each object is walked once; where it comes again, its number stands for it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # alive until the walk has ended, so that no two of them have one identity

    def key(self, value: Any) -> str:
        self._add(value)
        return self._hash.hexdigest()[:32]

    def _write(self, kind: str, text: bytes = b"") -> None:
        name = kind.encode()
        self._hash.update(struct.pack("<II", len(name), len(text)) + name + text)

    def _add(self, value: Any) -> None:
        if type(value) in _PLAIN:
            said = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
            self._write(type(value).__name__, said)
            return
        if id(value) in self._numbers:
            self._write("again", str(self._numbers[id(value)]).encode())
            return
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if len(self._kept) > _MOST_OBJECTS:
            raise _NoKeyError
        self._add_parts(value)

    def _add_all(self, kind: str, *values: Any) -> None:
        self._write(kind, str(len(values)).encode())
        for value in values:
            self._add(value)

    def _add_parts(self, value: Any) -> None:
        if type(value) in (tuple, list):
            self._add_all(type(value).__name__, *value)
        elif type(value) in (dict, MappingProxyType):
            self._add_all("dict", *(part for item in value.items() for part in item))
        elif type(value) in (set, frozenset):  # their order changes from process to process
            self._add_all(type(value).__name__, *sorted(_Walk().key(element) for element in value))
        elif isinstance(value, ModuleType):
            self._write("module", value.__name__.encode())
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif _of_library(value):
            self._write("library", f"{value.__module__}.{value.__qualname__}".encode())
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, MethodType):
            self._add_all("method", value.__func__, value.__self__)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, property | staticmethod | classmethod | cached_property):
            held = [getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func")]
            self._add_all(type(value).__name__, *held)
        else:
            self._add_object(value)

    def _add_code(self, code: CodeType) -> None:
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._add_all(
            "code",
            *(code.co_code, code.co_exceptiontable, code.co_names, code.co_varnames[: sum(shape[::2])], shape),
            *code.co_consts,
        )

    def _add_function(self, function: FunctionType) -> None:
        self._write("function", function.__name__.encode())
        code = function.__code__
        closed = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                closed += [name, cell.cell_contents]
            except ValueError:  # not yet set: it is called before what follows it
                closed += [name, "unset"]
        self._add_all("kept", code, function.__defaults__, function.__kwdefaults__, *closed)
        named = dict(_named(code, function.__globals__))
        self._add_all("globals", *(part for item in sorted(named.items()) for part in item))
        if function.__dict__:
            self._add_all("attributes", function.__dict__)

    def _add_class(self, user_class: type) -> None:
        """A class of the user's: its bases, and what it defines."""
        self._write("class", user_class.__qualname__.encode())
        own = {
            name: member
            for name, member in sorted(vars(user_class).items())
            if name not in _NO_BEHAVIOUR and not isinstance(member, GetSetDescriptorType)
        }
        self._add_all("defines", *user_class.__bases__, *(part for item in own.items() for part in item))

    def _add_object(self, value: Any) -> None:
        try:
            reduce = dispatch_table.get(type(value))
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:
            raise _NoKeyError from None
        if isinstance(reduced, str):  # known by a name of its module, which says nothing of what it holds
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is None:
                raise _NoKeyError
            self._add_all("wrapped", type(value), wrapped)
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        self._kept.append(reduced)
        self._add_all("object", type(value), make, arguments, state)
        self._add_all("items", *(() if items is None else items))
        self._add_all("pairs", *(() if pairs is None else (part for pair in pairs for part in pair)))


def _named(code: CodeType, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What code reads of its module, and of other modules of the user's, by name; of nested code too.

    Raises:
        _NoKeyError: it imports a module of the user's that is not there yet.
    """
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in _NAMES and name in names:
            yield name, names[name]
            yield from _attributes(name, names[name], code.co_names)
        elif instruction.opname == "IMPORT_NAME":
            if name in sys.modules:
                yield from _attributes(name, sys.modules[name], code.co_names)
            elif not _can_be_imported(name):
                raise _NoKeyError
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, names)


def _attributes(name: str, module: Any, wanted: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What code may read of a module; nothing of a library."""
    if isinstance(module, ModuleType) and not _is_library(module):
        for attribute in wanted:
            if attribute in vars(module):
                value = vars(module)[attribute]
                yield f"{name}.{attribute}", value
                if value is not module:
                    yield from _attributes(f"{name}.{attribute}", value, wanted)


def _of_library(value: Any) -> bool:
    """Whether it is what an installed library, or Python itself, has under its name."""
    if not isinstance(value, FunctionType | BuiltinFunctionType | type):
        return False
    there: Any = sys.modules.get(value.__module__ or "")
    if not isinstance(there, ModuleType) or not _is_library(there):
        return False
    for part in value.__qualname__.split("."):
        there = getattr(there, part, None)
    return there is value


def _is_library(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names if file is None else is_installed(file)


def _can_be_imported(module: str) -> bool:
    try:
        spec = find_spec(module.partition(".")[0])  # that of a module inside a package would import the package
    except (ImportError, ValueError):
        spec = None
    return spec is not None and (not spec.has_location or is_installed(spec.origin or ""))


@cache
def is_installed(file: str) -> bool:
    """Whether a file of code belongs to Python, an installed library or this package."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(file.startswith(f"{place}/") for place in (*places, Path(__file__).parents[1]))
