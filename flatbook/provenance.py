"""What a number depends on besides its inputs: versions, machine, memory and commit."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("flatbook", "numpy", "scipy", "torch", "torchvision")


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute.

    Reads the installed metadata, so nothing is imported. A package that is not installed is
    left out.

    Example:
        >>> sorted(package_versions())
        ['flatbook', 'numpy', 'python', 'scipy', 'torch', 'torchvision']
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def machine(*, workers: int = 0) -> str:
    """Say in words where computations run: the processor, and the GPU if there is one.

    Args:
        workers: Number of processes of one torch thread each; 0 for this process alone with
            the threads torch has.

    Returns:
        Words such as ``"AMD EPYC 7B13, 2 processes of 1 thread"`` or, on a GPU,
        ``"NVIDIA H200 (AMD EPYC 9654, 16 threads)"``.
    """
    import torch

    from flatbook import runtime

    device = runtime.device()
    threads = torch.get_num_threads()
    crew = f"{workers} × 1 thread" if workers else f"{threads} thread{'s' * (threads != 1)}"
    host = f"{processor()}, {crew}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({host})"
    return f"Apple GPU ({host})" if device.type == "mps" else host


def processor() -> str:
    """Return the model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        if name:
            return name
    return platform.processor() or platform.machine() or "unknown processor"


def peak_memory_mib() -> float | None:
    """Return the largest resident memory so far of this process or of a child, in MiB.

    The figure is that of the largest *single* process since each began; children count once they
    have ended. None where the operating system does not count (Windows).
    """
    try:
        import resource
    except ImportError:
        return None
    kib = 1 / 1024 if sys.platform == "darwin" else 1  # macOS counts bytes, Linux KiB
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * kib
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib
    status = Path("/proc/self/status")
    if status.exists():
        # Linux starts ru_maxrss with the size of whatever program launched this one; not so this.
        found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.M)
        own = int(found[1]) if found else own
    return round(max(own, child) / 1024, 1)


def commit() -> str | None:
    """Return the commit the package was loaded from.

    Returns:
        The full hash of HEAD, followed by ``+`` if files of the package differ from it; None if
        the package is not tracked by git (an ordinary installation).
    """
    package = Path(__file__).parent
    # Without this test, a package inside a virtual environment would pass for a version of the
    # unrelated repository around it.
    if _output("git", "ls-files", "--", "__init__.py", folder=package) != "__init__.py":
        return None
    head = _output("git", "rev-parse", "HEAD", folder=package)
    if not head:
        return None
    clean = _output("git", "status", "--porcelain", "--", ".", folder=package) == ""
    return head if clean else f"{head}+"


def _output(*command: str, folder: Path | None = None) -> str | None:
    """Return what ``command`` prints, or None if it fails or is not there."""
    # A git hook sets variables that would point these commands at another repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command, cwd=folder, env=clean, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
