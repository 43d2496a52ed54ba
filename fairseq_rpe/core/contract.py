"""Helpers for checking user-written classes: source locations, misspelled hooks, calls of hooks and random states."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fairseq_rpe.core.errors import UserError, shorten_path, user_message

if TYPE_CHECKING:
    import torch
else:
    from fairseq_rpe.core import lazy_torch as torch

_PACKAGE = __name__.partition(".")[0]
_MIN_LONG_NAME = 5  # names of at least so many letters count as misspelled if one letter is replaced
_MIN_NAME = 4  # names of fewer letters do not count as misspelled if one letter is missing or added
_MIN_SIMILARITY = 0.6  # share of matching letters of two names that are near each other
# distances and positions beyond any training length, exact in float32
FAR_DISTANCES = (1 << 10, 1 << 13, 1 << 16, 1 << 17)


class ContractError(UserError):
    """A user's class does not fulfil the contract of its base class."""


def is_shipped(cls: type) -> bool:
    """Return whether a class belongs to this package; its tests check those."""
    return cls.__module__.partition(".")[0] == _PACKAGE


def user_class_defining(cls: type, method: str) -> type | None:
    """Return the user's class that defines ``method`` for ``cls``, or None if this package or no class defines it."""
    owner = next((base for base in cls.__mro__ if method in vars(base)), None)
    return None if owner is None or is_shipped(owner) else owner


def source_location(cls: type, method: str | None = None) -> str:
    """Return where a method of a user's class, or the class, is defined.

    Args:
        cls: The class, or a subclass of the one that defines the method.
        method: Name of the method; with None, or a method that no user defines, the class is located.

    Returns:
        A location such as ``my_encoding.py:14``; "" if it is unknown.
    """
    owner = user_class_defining(cls, method) if method else None
    if owner is not None and method is not None:
        attribute = vars(owner)[method]
        function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", None) or inspect.unwrap(attribute)
        code = getattr(function, "__code__", None)
        if code is not None:
            return _file_and_line(code.co_filename, code.co_firstlineno)
    with contextlib.suppress(OSError, TypeError):
        return _file_and_line(inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1])
    module = sys.modules.get(cls.__module__)
    return _file_and_line(getattr(module, "__file__", None) or "", None)


def _file_and_line(file: str, line: int | None) -> str:
    path = Path(file)
    if file and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return "" if not file else shorten_path(path) if line is None else f"{shorten_path(path)}:{line}"


def raise_contract_error(cls: type, method: str | None, text: str) -> NoReturn:
    """Raise a ContractError with the message ``Class.method text: file:line``."""
    name = cls.__name__ if method is None else f"{cls.__name__}.{method}"
    location = source_location(cls, method)
    raise ContractError(f"{name} {text}" + (f": {location}" if location else ""))


def call_user_method(cls: type, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a user's class. UserErrors and errors of memory pass through.

    Args:
        cls: The user's class.
        method: Name of the method, for the message.
        function: The bound method.
        args: Its positional arguments; the message describes tensors among them.
        kwargs: Its keyword arguments.

    Returns:
        What the method returns.

    Raises:
        ContractError: The method fails; the message names class, method, error and the line in the user's file.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if user_message(error) is not None or is_shipped(type(error)):
            raise
        tensors = ", ".join(_describe_tensor(x) for x in args if isinstance(x, torch.Tensor))
        what = f"fails{f' for {tensors}' if tensors else ''}: {type(error).__name__}: {_first_line(error)}"
        location = _line_of(error, cls) or source_location(cls, method)
        raise ContractError(f"{cls.__name__}.{method} {what}" + (f": {location}" if location else "")) from error


def _describe_tensor(tensor: torch.Tensor) -> str:
    """Return dtype and shape in words, and the range of positions or distances, which have at most two dimensions."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return f"{text} from {tensor.min():,.10g} to {tensor.max():,.10g}" if tensor.dim() < 3 and tensor.numel() else text


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message").strip().rstrip(".")


def _line_of(error: BaseException, cls: type) -> str:
    """Return the last line of the user's files in the traceback of ``error``, or ""."""
    modules = (sys.modules.get(base.__module__) for base in cls.__mro__ if not is_shipped(base))
    files = {getattr(module, "__file__", None) for module in modules}
    location, trace = "", error.__traceback__
    torch_folder = str(Path(torch.nn.__file__).parents[1])
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file in files and not file.startswith(torch_folder):
            location = _file_and_line(file, trace.tb_lineno)
        trace = trace.tb_next
    return location


def check_hook_names(
    cls: type, family: type, required: Iterable[str], optional: Iterable[str], provided_elsewhere: bool = False
) -> None:
    """Refuse a user's class that defines none of the required hooks, or misspells a hook.

    Args:
        cls: The class.
        family: Base class of this package, which has all hooks.
        required: Hooks of which one is enough.
        optional: Further methods and attributes that a class may define.
        provided_elsewhere: Whether a required hook is set on the instance, or inherited from a complete class of this
            package, so that ``cls`` itself need not define any.

    Raises:
        ContractError: The message names the class and the missing hook, or the misspelled name and the hook.
    """
    required = tuple(required)
    has_hook = provided_elsewhere or any(
        getattr(cls, name, None) is not getattr(family, name, None) for name in required
    )
    defined = _public_names(cls)
    unknown = [name for name in defined if not hasattr(family, name)] if issubclass(cls, family) else []
    for hook in (*required, *optional):
        if hook in defined:
            continue
        for name in unknown:
            # a class without any hook probably means one of them, so less similarity is enough
            if _is_slip(name, hook) or (not has_hook and _is_near(name, hook)):
                raise_contract_error(
                    cls, None, f"defines '{name}', which nothing calls, and no '{hook}': rename it to '{hook}'"
                )
    if not has_hook:
        lacking = " or ".join(required[:2]) if len(required) < 4 else "any of " + ", ".join(required)
        raise_contract_error(cls, None, f"does not define {lacking}, so this {family.__name__} does nothing: define it")


def _public_names(cls: type) -> list[str]:
    """Return the public names that the user's classes among the bases of ``cls``, and itself, define."""
    return [name for base in cls.__mro__ if not is_shipped(base) for name in vars(base) if not name.startswith("_")]


def _is_slip(name: str, hook: str) -> bool:
    """Whether two letters are swapped, or one is missing, added or, in a long name, replaced."""
    name, hook = name.lower(), hook.lower()
    if len(name) != len(hook):
        short, long = sorted((name, hook), key=len)
        if len(short) < _MIN_NAME or len(long) != len(short) + 1:
            return False
        return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))
    wrong = [i for i in range(len(name)) if name[i] != hook[i]]
    if len(wrong) == 2:
        first, second = wrong
        return second == first + 1 and name[first] == hook[second] and name[second] == hook[first]
    return not wrong or (len(wrong) == 1 and len(name) >= _MIN_LONG_NAME)


def _is_near(name: str, hook: str) -> bool:
    """Whether many of the letters of two names match."""
    import difflib

    return difflib.SequenceMatcher(None, name.lower(), hook.lower()).ratio() >= _MIN_SIMILARITY


@contextlib.contextmanager
def preserve_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of torch, Python and, if it is imported, numpy at the end.

    Args:
        device: A device whose state is restored, too, if it is a GPU.

    Yields:
        Nothing.
    """
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
