"""The files beside a model's weights: tokenizer, template, generation config, configs of processors.

A run, and an import, copy them once, by content, to the folder ``files`` beside the saves; each save lists them with
their checksums, and exports take them from there. Of samples with labels, those in the token file come first: their
template and end tokens are trained on.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from planner.files.text import MIB, is_directory, parse_json, read_bytes, shorten
from runtime.checkpoint.manifest import Manifest, ModelFile, checksum
from runtime.data.token_file import files_in, is_token_file

FOLDER = "files"
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_OF_WEIGHTS = (".index.json", "adapter_config.json", "config.json", "trainer_state.json")  # of what is trained
_KEPT = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "generation_config.json")
_MOST_BYTES = 256 * MIB


def model_files(reference: str, sources: Iterable[str]) -> dict[str, bytes]:
    """Of the directory of ``hf:DIR``, and of the token files among ``sources``. Raises PlanError."""
    directory = Path(reference.removeprefix("hf:"))
    found = _in(directory) if reference.startswith("hf:") and is_directory(directory) else {}
    for source in sources:
        if is_token_file(Path(source)):
            found |= {name: text for name, text in files_in(Path(source)).items() if name != "config.json"}
    return {name: _plain(name, content) for name, content in found.items()}


def files_of_run(save: Path) -> dict[str, bytes]:
    """Those that the run of a save keeps."""
    folder = save.parent / FOLDER
    return _in(folder) if is_directory(folder) else {}


def keep_files(files: Mapping[str, bytes], folder: Path) -> tuple[ModelFile, ...]:
    """Write them to the folder of a run; returns what its saves list."""
    write_files(files, folder)
    return _listed(files)


def _listed(files: Mapping[str, bytes]) -> tuple[ModelFile, ...]:
    return tuple(
        ModelFile(name=name, bytes=len(content), checksum=checksum(content))
        for name, content in files.items()
        if name.isprintable()
    )


def told_of_changes(save: Path, manifest: Manifest) -> Iterator[str]:
    """A line for each file that is not the one with which the save was written."""
    found = {file.name: file for file in _listed(files_of_run(save))}
    for file in manifest.model_files:
        if found.get(file.name) != file:
            how = "was changed after" if file.name in found else "is absent, but was there when"
            yield f"{shorten(save.parent / FOLDER / file.name)} {how} {save.name} was saved"


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def told_of(files: Mapping[str, bytes], directory: str) -> str:
    """A line if an export has no tokenizer; empty otherwise."""
    if any(name.startswith(("tokenizer", "vocab")) for name in files):
        return ""
    return f"{shorten(directory)} has no tokenizer: neither MODEL nor the data names a directory with one"


def _in(directory: Path) -> dict[str, bytes]:
    """Texts and data alone: no code, no pickles, no weights, and no link that leads out of the directory. A snapshot in
    the Hub's cache links all of its files to ``blobs`` of the same repository.
    """
    root, found = directory.resolve(), {}
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")]):
        is_asked = path.suffix in _SUFFIXES and (path.name in _KEPT or not path.name.endswith(_OF_WEIGHTS))
        if is_asked and path.is_file() and any(path.resolve().is_relative_to(each) for each in roots):
            name = str(path.relative_to(directory))
            found[name] = read_bytes(path, name, most_bytes=_MOST_BYTES)
    return found


def _plain(name: str, content: bytes) -> bytes:
    """Without the names of code that is not copied."""
    if not name.endswith(".json") or b'"auto_map"' not in content:
        return content
    try:
        value = parse_json(content.decode())
    except ValueError:
        return content
    if isinstance(value, dict):
        value.pop("auto_map", None)
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
