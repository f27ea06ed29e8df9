"""`kernels.c` as a shared library: compiled once per machine, then found in the cache.

A compiler is asked for at run time, as PyTorch's own inductor does it: no package of this project
has to be built for each kind of processor, and a checkout works as it is. The library and PyTorch
must share one OpenMP, or their threads get in each other's way; PyTorch's is loaded before, under
the name that the library asks for.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # noqa: F401  its OpenMP has to be loaded first

from dflash_core.errors import KernelError
from dflash_core.gguf import cache_root

SOURCE = Path(__file__).with_name("kernels.c")
SOURCES = (SOURCE, *(SOURCE.with_name(name) for name in ("avx512.h", "avx2.h")))
# Sets of instructions, the fastest first, as Linux calls them: AMD Zen 4 and Intel Cooper Lake have
# the first, and nearly every x86 processor since 2015 the second.
INSTRUCTIONS = (
    ("fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"),
    ("fma", "avx2"),
)
# A multiplication and an addition are one instruction where the source says so and nowhere else:
# the compiler's own choice could differ from one number of rows to the next.
FLAGS = ("-O3", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=off")
TIMEOUT_S = 120
logger = logging.getLogger(__name__)


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library, or None on a processor or a machine that cannot have it (said in the log)."""
    instructions = processor_instructions()
    if instructions is None:
        return None
    try:
        return ctypes.CDLL(str(compiled(instructions)))
    except (KernelError, OSError) as error:
        logger.warning(
            "%s; bf16 on this CPU takes some four times as long without its kernels: install a "
            "C compiler (gcc >= 10 or clang >= 9 with OpenMP), as `cc` or named by CC",
            error,
        )
        return None


def processor_instructions() -> tuple[str, ...] | None:
    """The fastest of INSTRUCTIONS that this processor has, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            has = set(line.split())
            return next((names for names in INSTRUCTIONS if has.issuperset(names)), None)
    return None


def compiled(instructions: tuple[str, ...]) -> Path:
    """The library's file. Safe to call from several processes at once.

    Raises:
        KernelError: there is no compiler, it fails, or the cache folder cannot be written.
    """
    compiler = os.environ.get("CC") or "cc"
    if shutil.which(compiler) is None:
        raise KernelError(f"there is no C compiler {compiler!r}")
    options = (*FLAGS, *(f"-m{name.replace('_', '')}" for name in instructions))
    sources = b"".join(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(sources + " ".join((compiler, *options)).encode()).hexdigest()
    file = cache_root() / f"kernels-{key[:12]}.so"
    if file.exists():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            unfinished = Path(folder, file.name)
            _run([compiler, *options, str(SOURCE), "-o", str(unfinished)])
            unfinished.rename(file)
    except OSError as error:
        raise KernelError(f"{file} cannot be written ({error.strerror})") from error
    return file


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise KernelError(f"{command[0]} cannot compile {SOURCE.name} ({last})") from error
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{command[0]} took more than {TIMEOUT_S} s") from error
