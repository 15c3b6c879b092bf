"""Single files of other projects, at pinned commits or of pinned releases, imported without the packages around them.

For projects that are in no registry, or whose package cannot be imported without a GPU: bench/peers-files.txt. A file
is fetched when it is first needed, and only used if its SHA-256 is the pinned one. What it imports of its project and
is not pinned itself is absent: a stand-in whose use raises an error, so that nothing but the pinned code can run.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

PINS = Path(__file__).with_name("peers-files.txt")
CACHE = Path(sys.prefix) / "peers-sources"
TIMEOUT_S = 30.0
MOST_BYTES = 4 << 20


class Pin(NamedTuple):
    repository: str
    commit: str
    path: str
    sha256: str

    @property
    def file(self) -> Path:
        return CACHE / self.repository.replace("/", "+") / self.path

    @property
    def in_registry(self) -> bool:
        """A package of PyPI, whose commit is its version."""
        return "/" not in self.repository

    @property
    def url(self) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.path}"


def pins(repository: str) -> list[Pin]:
    lines = (line.split() for line in PINS.read_text().splitlines() if line and not line.startswith("#"))
    return [pin for pin in (Pin(*line) for line in lines) if pin.repository == repository]


def commit_of(repository: str) -> str:
    """The pinned commit, short."""
    return pins(repository)[0].commit[:8]


def checkout(repository: str) -> Path:
    """The folder with a project's pinned files; raises as :func:`load` does."""
    try:
        for pin in pins(repository):
            _have(pin)
    except OSError as reason:
        raise OSError(f"pinned files of {repository} are neither here nor can they be fetched: {reason}") from reason
    return CACHE / repository.replace("/", "+")


def load(repository: str, module: str, *, root: str = ".", absent: Sequence[str] = ()) -> Any:
    """Import a module of a project from its pinned files.

    Args:
        repository: as bench/peers-files.txt has it.
        module: its full name.
        root: the folder of the repository in which imports begin.
        absent: further packages that are not there; the module's own is among them.

    Raises:
        OSError: a file cannot be fetched.
        ValueError: a file is not the pinned one.
    """
    folder = checkout(repository) / root
    packages = (module.partition(".")[0], *absent)
    with _only(folder, packages):
        return importlib.import_module(module)


def _have(pin: Pin) -> None:
    if not pin.file.exists():
        data = _fetched(pin)
        _check(pin, data)
        pin.file.parent.mkdir(parents=True, exist_ok=True)
        whole = pin.file.with_name(f"{pin.file.name}.{os.getpid()}")  # another process may be fetching it too
        whole.write_bytes(data)
        whole.replace(pin.file)
    _check(pin, pin.file.read_bytes())


def _fetched(pin: Pin) -> bytes:
    if pin.in_registry:
        return _of_its_wheel(pin)
    if _unreachable:  # a machine without this way out is asked once, not for half a minute each time
        raise OSError(_unreachable[0])
    try:
        with urllib.request.urlopen(pin.url, timeout=TIMEOUT_S) as answer:  # https, see Pin.url
            return bytes(answer.read(MOST_BYTES))
    except urllib.error.HTTPError:
        raise
    except OSError as reason:
        _unreachable.append(str(reason))
        raise


def _of_its_wheel(pin: Pin) -> bytes:
    """One file, without installing what its package depends on."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        command = [sys.executable, "-m", "pip", "download", *options, f"{pin.repository}=={pin.commit}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.strip().rpartition("\n")[2])
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            return files.read(pin.path)


_unreachable: list[str] = []
"""Why, once that is known."""


def _check(pin: Pin, data: bytes) -> None:
    if (found := hashlib.sha256(data).hexdigest()) != pin.sha256:
        raise ValueError(f"{pin.repository} {pin.path} has the SHA-256 {found}, not the pinned {pin.sha256}")


# --- what is not there -----------------------------------------------------------------------------------------------


class _AbsentType(type):
    """May be inherited from, or named in an annotation; nothing else."""

    def __getattr__(cls, name: str) -> type[Absent]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Absent:
            _refuse()
        return super().__call__(*args, **kwargs)


class Absent(metaclass=_AbsentType):
    """Of a file that is not pinned."""


def _refuse() -> NoReturn:
    raise NotImplementedError("this belongs to a file that bench/peers-files.txt does not have")


class _Absences(MetaPathFinder, Loader):
    """The last to be asked for a module: one of these packages that no file has is absent."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: _AbsentType.__getattr__(Absent, name)  # type: ignore[method-assign]


@contextmanager
def _only(folder: Path, packages: Sequence[str]) -> Iterator[None]:
    """Imports of these packages come from this folder, and are forgotten afterwards: the real ones are not shadowed."""

    def of_these() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    before = {name: sys.modules.pop(name) for name in of_these()}
    finder = _Absences(packages)
    sys.path.insert(0, str(folder))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(folder))
        for name in of_these():
            del sys.modules[name]
        sys.modules.update(before)
