"""What mkdocs makes pages of: the repository's own files under their own paths, so that their links hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PATTERNS = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "NOTICE",
    "docs/*.md", "docs/*.svg", "docs/*.png", "docs/site/*.css", "examples/*.py", "examples/*.ipynb",
    "benchmarks/results/**/*.md", "benchmarks/results/**/*.png", "benchmarks/results/**/*.json",
)  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs's own files of docs/ are replaced; those of the theme stay."""
    theme = [file for file in files if not str(file.abs_src_path).startswith(str(ROOT / "docs"))]
    return Files([*theme, *repository_files(config)])


def repository_files(config: MkDocsConfig) -> Iterator[File]:
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            yield File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls)
