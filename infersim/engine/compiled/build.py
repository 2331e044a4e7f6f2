"""Compiles the engine once per machine and loads the machine code without Numba afterwards.

Numba's own cache does not notice a changed callee in another file, fails without a writable folder, and costs 0.5 s of
imports before the first call. So the object code that Numba makes of `advance.advance` is kept in a per-user folder
named after a hash of everything it depends on, and loaded with llvmlite (a dependency of Numba): 3 ms, and 1 us a call.
"""

import contextlib
import ctypes
import getpass
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

from .state import CODES, KNOBS


def cache_folder() -> Path:
    """Folder of the compiled engine: $INFERSIM_CACHE_DIR, else the user's cache folder, else a temporary one.

    What lies there is run as machine code, so it is one that nobody else may write to.
    """
    for wished in (_wished_folder, _temporary_folder):
        try:
            folder = wished()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_mine_alone(folder):
                print(f"infersim: {folder} may be written to by others: the compiled engine is not kept there;"
                      " must be yours, with mode 755 or less", file=sys.stderr)  # fmt: skip
                continue
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except (OSError, RuntimeError):  # RuntimeError: a user without a home
            pass
    return Path(tempfile.mkdtemp(prefix="infersim-"))


def _is_mine_alone(folder: Path) -> bool:
    """Whether the folder is this user's, and nobody else may write to it."""
    found = folder.stat()
    return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


def _wished_folder() -> Path:
    if "INFERSIM_CACHE_DIR" in os.environ:
        return Path(os.environ["INFERSIM_CACHE_DIR"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "infersim"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infersim"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"infersim-{os.getuid() if hasattr(os, 'getuid') else getpass.getuser()}"


def key() -> str:
    """Hash of the engine's sources, the compilers' versions and the processor."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(repr((KNOBS, CODES)).encode())  # not the text of knobs.py, which explains more than it decides
    features = json.dumps(dict(llvm.get_host_cpu_features()), sort_keys=True)
    checked = f"boundscheck={bool(os.environ.get('INFERSIM_BOUNDSCHECK'))}"
    for part in (checked, version("numba"), version("llvmlite"), version("numpy"), sys.version, *os.uname()[::4]):
        digest.update(part.encode())
    digest.update((llvm.get_host_cpu_name() + features).encode())
    return digest.hexdigest()[:24]


def _compile() -> tuple[bytes, dict]:
    """Object code of the engine, and its symbols: the entry, and Numba's helpers that it names and never calls."""
    import gc

    import numba
    from numba import types
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.runtime import _nrt_python
    from numba._helperlib import c_helpers  # isort: skip

    from .advance import advance
    from .arrays import arrays_of
    from .njit import APART

    def entry(call):
        advance(arrays_of(call))

    collecting = gc.isenabled()
    gc.disable()  # of millions of objects that all stay, looking through them again and again is a tenth of the time
    try:
        with _texts_only() as texts:
            compiled = numba.cfunc(types.void(types.voidptr), error_model="numpy")(entry)
    finally:
        if collecting:
            gc.enable()
    symbol = compiled.native_name
    with global_compiler_lock:
        module = llvm.parse_assembly("")
        for text in texts:
            module.link_in(llvm.parse_assembly(text))
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"  # so LLVM may inline what has one caller, and leave out what has none
            if any(f"{len(name)}{name}B" in function.name for name in APART):  # mangled
                function.add_function_attribute("noinline")
    helpers = ["numba_" + name for name in c_helpers] + ["NRT_" + name for name in _nrt_python.c_helpers]
    return _object_code(module), {"entry": symbol, "helpers": helpers}


@contextlib.contextmanager
def _texts_only() -> Iterator[list[str]]:
    """LLVM's text of each function that Numba compiles meanwhile. Numba would parse, link and optimise each with all
    that it calls, in half of all its time; here all are linked once, and none is called."""
    from unittest.mock import patch

    from llvmlite.ir.types import Type
    from numba.core import cgutils
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen

    texts: list[str] = []
    with (
        patch.object(
            JITCodeLibrary, "add_ir_module", lambda self, module: texts.append(cgutils.normalize_ir_text(str(module)))
        ),
        patch.object(JITCodeLibrary, "finalize", lambda self: setattr(self, "_finalized", True)),
        patch.object(JITCodeLibrary, "get_pointer_to_function", lambda self, name: 1),
        patch.object(JITCPUCodegen, "set_env", lambda self, name, environment: None),
        patch.object(Type, "get_abi_size", cache(Type.get_abi_size)),  # it asks LLVM for each variable
    ):
        yield texts


def _object_code(module) -> bytes:
    """LLVM's module as this processor's object code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.inlining_threshold = 50
    # loops here are short, and a fifth of LLVM's time goes into making them long
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _build(folder: Path) -> tuple[bytes, dict]:
    """Compile, and leave the result in `folder` for later runs: atomically, two processes may do so at once."""
    if sys.stderr is not None:
        print("infersim: compiling the engine (once per installation, about 15 s)", file=sys.stderr, flush=True)
    code, symbols = _compile()
    symbols |= {"sha256": hashlib.sha256(code).hexdigest()}
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        (new / "engine.o").write_bytes(code)
        (new / "symbols.json").write_text(json.dumps(symbols))
        if _read(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    return code, symbols


def _read(folder: Path) -> tuple[bytes, dict] | None:
    """Object code and symbols as `_build` left them; None if they are not there, or were damaged since."""
    try:
        code, symbols = (folder / "engine.o").read_bytes(), json.loads((folder / "symbols.json").read_text())
    except (OSError, ValueError):
        return None
    return (code, symbols) if symbols.get("sha256") == hashlib.sha256(code).hexdigest() else None


@cache
def load():
    """The engine's entry as a ctypes function of the address of an interface.CALL, compiled first if need be."""
    folder = cache_folder() / key()
    code, symbols = _read(folder) or _build(folder)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Error paths of Numba's wrapper name its helpers; the engine raises nothing (error_model "numpy"), so they are
    # never called, and Numba need not be imported to have them.
    never = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for helper in symbols["helpers"]:
        llvm.add_symbol(helper, never)
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address(symbols["entry"]))
    function.engine = engine  # keeps the machine code alive
    return function
