"""What the checks of user-written classes share: where an author's method is, near names, an untouched random state."""

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from fairseq_rpe.core.errors import UserError, shown, told

_PACKAGE = __name__.partition(".")[0]
_LONG = 5  # letters from which a name with one other letter is taken for a misspelling
FAR = (1 << 10, 1 << 13, 1 << 16, 1 << 17)  # distances and positions beyond any training length, exact in float32


class ContractError(UserError):
    """A user's class does not keep to what its base class asks for."""


def is_shipped(cls: type) -> bool:
    """Whether a class is this package's own; the tests check those."""
    return cls.__module__.partition(".")[0] == _PACKAGE


def author_of(cls: type, method: str) -> type | None:
    """The user's class that defines ``method`` for ``cls``; None where this package or nobody defines it."""
    owner = next((base for base in cls.__mro__ if method in vars(base)), None)
    return None if owner is None or is_shipped(owner) else owner


def location(cls: type, method: str | None = None) -> str:
    """``my_encoding.py:14``, where ``method`` of a user's class begins, or the class; empty where that is unknown.

    Args:
        cls: the class, or a subclass of the one that defines the method.
        method: its name; None, or a method that no user defines, stands for the class.
    """
    owner = author_of(cls, method) if method else None
    if owner is not None and method is not None:
        attribute = vars(owner)[method]
        function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", None) or inspect.unwrap(attribute)
        code = getattr(function, "__code__", None)
        if code is not None:
            return _place(code.co_filename, code.co_firstlineno)
    with contextlib.suppress(OSError, TypeError):
        return _place(inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1])
    module = sys.modules.get(cls.__module__)
    return _place(getattr(module, "__file__", None) or "", None)


def _place(file: str, line: int | None) -> str:
    path = Path(file)
    if file and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return "" if not file else shown(path) if line is None else f"{shown(path)}:{line}"


def refuse(cls: type, method: str | None, text: str) -> NoReturn:
    """Raise the ContractError ``Class.method text: file:line``."""
    name = cls.__name__ if method is None else f"{cls.__name__}.{method}"
    place = location(cls, method)
    raise ContractError(f"{name} {text}" + (f": {place}" if place else ""))


def call(cls: type, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a user's method returns. Its UserErrors pass, and so does a lack of memory.

    Raises:
        ContractError: the method fails; the line names the class, the method, the error and the author's line.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if told(error) is not None or is_shipped(type(error)):
            raise
        tensors = ", ".join(_described(x) for x in args if isinstance(x, torch.Tensor))
        what = f"fails{f' for {tensors}' if tensors else ''}: {type(error).__name__}: {_first_line(error)}"
        place = _line_of(error, cls) or location(cls, method)
        raise ContractError(f"{cls.__name__}.{method} {what}" + (f": {place}" if place else "")) from error


def _described(x: torch.Tensor) -> str:
    text = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    return f"{text} from {x.min():,.10g} to {x.max():,.10g}" if x.dim() < 3 and x.numel() else text


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "no message").strip().rstrip(".")


def _line_of(error: BaseException, cls: type) -> str:
    """The last line of the author's files that the error came through."""
    modules = (sys.modules.get(base.__module__) for base in cls.__mro__ if not is_shipped(base))
    files = {getattr(module, "__file__", None) for module in modules}
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file in files and not file.startswith(str(Path(torch.__file__).parent)):
            place = _place(file, trace.tb_lineno)
        trace = trace.tb_next
    return place


def check_names(
    cls: type, family: type, required: Iterable[str], optional: Iterable[str], filled: bool = False
) -> None:
    """Refuse a user's class that defines none of ``required``, or a public name one slip away from a hook's.

    Args:
        cls: the class.
        family: the class of this package that it fills, which has all hooks.
        required: methods of which one is enough.
        optional: further methods and attributes that a class may define.
        filled: something else than the class does what is required.

    Raises:
        ContractError: names the class, what it lacks and the name that is near to it.
    """
    required = tuple(required)
    own = [name for base in cls.__mro__ if not is_shipped(base) for name in vars(base) if not name.startswith("_")]
    unknown = [name for name in own if not hasattr(family, name)] if issubclass(cls, family) else []
    filled = filled or any(getattr(cls, name, None) is not getattr(family, name, None) for name in required)
    for hook in (*required, *optional):
        for name in unknown:
            if hook not in own and (_is_slip(name, hook) or (not filled and _is_near(name, hook))):
                refuse(cls, None, f"defines '{name}', which nothing calls, and no '{hook}': rename it to '{hook}'")
    if not filled:
        lacking = " or ".join(required[:2]) if len(required) < 4 else "any of " + ", ".join(required)
        refuse(cls, None, f"does not define {lacking}, so this {family.__name__} does nothing: define it")


def _is_slip(name: str, hook: str) -> bool:
    """Whether a name is a hook's with two letters swapped, or one too many, too few or, in a long name, another."""
    a, b = name.lower(), hook.lower()
    if len(a) == len(b):
        wrong = [i for i in range(len(a)) if a[i] != b[i]]
        if len(wrong) == 2:
            first, second = wrong
            return second == first + 1 and a[first] == b[second] and a[second] == b[first]
        return not wrong or (len(wrong) == 1 and len(a) >= _LONG)
    short, long = sorted((a, b), key=len)
    if len(short) < 4 or len(long) != len(short) + 1:
        return False
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def _is_near(name: str, hook: str) -> bool:
    """Whether most letters of two names agree."""
    import difflib

    return difflib.SequenceMatcher(None, name.lower(), hook.lower()).ratio() >= 0.6


@contextlib.contextmanager
def untouched_random_state(device: torch.device) -> Iterator[None]:
    """What is drawn inside, from torch, Python or numpy, leaves their random states as they were."""
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
