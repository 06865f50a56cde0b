"""The packages of an environment, through its own Python and pip. Knows nothing of what they are for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from command import CommandError, Context, run


@dataclass(frozen=True)
class Packages:
    """`python` is the environment's interpreter. Everything raises CommandError when its command fails."""

    python: Path
    context: Context

    def run(self, *words: str) -> Sequence[str]:
        """Run the interpreter; returns the last lines that it printed."""
        return run([self.python, *words], self.context)

    def install(self, *words: str, env: Mapping[str, str] | None = None) -> Sequence[str]:
        command = [self.python, "-m", "pip", "install", "--progress-bar", "off", *words]
        return run(command, self.context, env=env)

    def has_pip(self) -> bool:
        try:
            self.run("-m", "pip", "--version")
        except CommandError:
            return False
        return True

    def cache_folder(self) -> Path:
        return Path(self.run("-m", "pip", "cache", "dir")[-1].strip())

    def has_cached_wheel(self, name: str, version: str) -> bool:
        """Whether pip keeps a wheel that it built on this machine before."""
        try:
            said = self.run("-m", "pip", "cache", "list", name.replace("-", "_"), "--format=abspath")
        except CommandError:  # the cache is switched off
            return False
        return any(f"-{version}-" in Path(line).name for line in said)

    def folder(self) -> Path:
        """Where packages lie: site-packages."""
        return Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))")[-1])

    def forget_halves(self) -> None:
        """Forget packages whose installation was cut off, which pip would take for installed."""
        for record in self.folder().glob("*.dist-info"):
            if not (record / "RECORD").exists():
                shutil.rmtree(record)
