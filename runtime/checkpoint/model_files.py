"""The files beside a model's weights: tokenizer, template, generation config, configs of processors.

A run or an import copies them once to the folder ``files`` beside the saves; each save lists them with their checksums,
and exports take them from there. The files in a token file of samples with labels take precedence: the model is trained
with their template and end tokens.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from planner.files.text import MIB, is_directory, parse_json, read_bytes, shorten
from runtime.checkpoint.manifest import Manifest, ModelFile, checksum
from runtime.data.token_file import files_in, is_token_file

FOLDER = "files"
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_OF_WEIGHTS = (".index.json", "adapter_config.json", "config.json", "trainer_state.json")  # written with the weights
_KEPT = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json", "generation_config.json")
_MOST_BYTES = 256 * MIB


def model_files(reference: str, sources: Iterable[str]) -> dict[str, bytes]:
    """Return the files of the directory of ``hf:DIR`` and of the token files among ``sources``. Raises PlanError."""
    directory = Path(reference.removeprefix("hf:"))
    files = _in(directory) if reference.startswith("hf:") and is_directory(directory) else {}
    for source in sources:
        if is_token_file(Path(source)):
            files |= {name: text for name, text in files_in(Path(source)).items() if name != "config.json"}
    return {name: _plain(name, content) for name, content in files.items()}


def files_of_run(save: Path) -> dict[str, bytes]:
    """Return the files that the run of a save keeps."""
    folder = save.parent / FOLDER
    return _in(folder) if is_directory(folder) else {}


def keep_files(files: Mapping[str, bytes], folder: Path) -> tuple[ModelFile, ...]:
    """Write the files to the folder of a run; return the entries for its saves."""
    write_files(files, folder)
    return _listed(files)


def _listed(files: Mapping[str, bytes]) -> tuple[ModelFile, ...]:
    return tuple(
        ModelFile(name=name, bytes=len(content), checksum=checksum(content))
        for name, content in files.items()
        if name.isprintable()
    )


def told_of_changes(save: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a line for each file that was changed or removed since the save was written."""
    now = {file.name: file for file in _listed(files_of_run(save))}
    for file in manifest.model_files:
        if now.get(file.name) != file:
            how = "was changed after" if file.name in now else "is absent, but was there when"
            yield f"{shorten(save.parent / FOLDER / file.name)} {how} {save.name} was saved"


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def told_of(files: Mapping[str, bytes], directory: str) -> str:
    """Return a line if an export has no tokenizer, else ""."""
    if any(name.startswith(("tokenizer", "vocab")) for name in files):
        return ""
    return f"{shorten(directory)} has no tokenizer: neither MODEL nor the data names a directory with one"


def _in(directory: Path) -> dict[str, bytes]:
    """Return the texts and data of a directory: no code, pickles or weights, and no link that leads out of it.

    A snapshot in the Hub's cache links all of its files to ``blobs`` of the same repository.
    """
    root, files = directory.resolve(), {}
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")]):
        is_kept = path.suffix in _SUFFIXES and (path.name in _KEPT or not path.name.endswith(_OF_WEIGHTS))
        if is_kept and path.is_file() and any(path.resolve().is_relative_to(each) for each in roots):
            name = str(path.relative_to(directory))
            files[name] = read_bytes(path, name, most_bytes=_MOST_BYTES)
    return files


def _plain(name: str, content: bytes) -> bytes:
    """Return the content without ``auto_map``, which names code that is not copied."""
    if not name.endswith(".json") or b'"auto_map"' not in content:
        return content
    try:
        value = parse_json(content.decode())
    except ValueError:
        return content
    if isinstance(value, dict):
        value.pop("auto_map", None)
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
