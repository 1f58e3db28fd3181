"""What a file of a spec may hold: keys given twice, YAML that is no spec, files that cannot be read. One error each."""

import sys

import pytest
from expecttest import assert_expected_inline

from passes.errors import SpecError
from planner.spec.spec import Spec
from tests.tools.specs import TWO_LINES, error, load

pytestmark = pytest.mark.check


def test_a_key_given_twice_names_both_lines(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "seed: 1\nseed: 2\n"),
        """\
the key 'seed' is given twice
  at:  spec.yaml:4
  fix: remove one; the first is on line 3""",
    )


def test_all_keys_given_twice_come_at_once(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "seed: 1\noptimizer: {lr: 1.0, lr: 2.0}\nseed: 2\nseed: 3\n"),
        """\
3 errors in the spec
the key 'lr' is given twice
  at:  spec.yaml:4
  fix: remove one; the first is on line 4
the key 'seed' is given twice
  at:  spec.yaml:5
  fix: remove one; the first is on line 3
the key 'seed' is given twice
  at:  spec.yaml:6
  fix: remove one; the first is on line 3""",
    )


def test_invalid_yaml_names_the_line(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "\tseed: 1\n"),
        """\
invalid YAML: while scanning for the next token, found character '\\t' that cannot start any token
  at:  spec.yaml:3
  fix: check the indentation (spaces, no tabs), brackets, quotes and colons around this line""",
    )
    assert_expected_inline(
        error(tmp_path, "mesh: {tp: 2\nbatch: 3\n"),
        """\
invalid YAML: while parsing a flow mapping, expected ',' or '}', but got ':'
  at:  spec.yaml:2
  fix: check the indentation (spaces, no tabs), brackets, quotes and colons around this line""",
    )


def exploding(innermost: str, around: str) -> str:
    """Twenty anchors, each of nine times the one before it."""
    lines = [f"a0: &a0 {innermost}"]
    lines += [f"a{n}: &a{n} {around.format(', '.join([f'*a{n - 1}'] * 9))}" for n in range(1, 20)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("a: 1\nb: \x01\n", "special characters", 2),
        ("mesh: &m {tp: *m}\n", "an alias refers to the value that contains it", None),
        ("mesh: &m {<<: *m}\n", "an alias refers to the value that contains it", None),
        ("mesh: {<<: 3}\n", "`<<` takes a mapping or a list of mappings", 1),
        ("mesh: {? [a] : b}\n", "a key must be a single word", 1),
        ("mesh: !!python/object:os.system {}\n", "the tag .* is not supported", 1),
        ("mesh: {tp: 2}\n---\nbatch: 3\n", "expected a single document", 2),
        ("- mesh\n", "the spec must be a mapping", 1),
        ("mesh: {tp: 2}\nseed: " + "9" * 400 + "\n", "the number 9+…9+ is too large", 2),
        ("mesh: {tp: 2}\nseed: " + "9" * 20_000 + "\n", "the number 9+…9+ is too large", 2),
        ("optimizer: {lr: 1e999}\n", "the number 1e999 is too large", 1),
        ("mesh: 2024-13-45\n", "mesh must be a mapping or auto, not the string '2024-13-45'", 1),
        ("mesh: {tp: 012}\n", "mesh.tp must be a whole number or auto, not the string '012'", 1),
        ("mesh: {tp: !!int foo}\n", "`foo` is not of the type of its tag, int", 1),
        ("mesh: {tp: !!bool foo}\n", "`foo` is not of the type of its tag, bool", 1),
        ("mesh: {tp: !!timestamp 2024-01-01}\n", "the tag .* is not supported", 1),
        ("mesh: !!binary =\n", "the tag .* is not supported", 1),
        ("mesh: " + "[" * 900 + "\n", "invalid YAML: nested too deeply", None),
        ("mesh:\n" + "- " * 900 + "1\n", "invalid YAML: nested too deeply", None),
        ("mesh: " + "[" * 100 + "]" * 100 + "\n", "mesh must be a mapping or auto, not the list", 1),
        ('loss: "\\ud800"\n', "lone surrogate", 1),
        ('loss: "\\UFFFFFFFF"\n', "invalid YAML: .*too large", None),
        ("%YAML 1." + "9" * 5000 + "\n---\nmesh: 1\n", "invalid YAML: Exceeds the limit", None),
        (exploding("[1, 2]", "[{}]"), "aliases repeat values too often", None),
        (exploding("{}", "{{<<: [{}]}}"), "aliases repeat values too often", None),
        ("#" * (256 * 1024 + 1), "the spec .*spec.yaml is larger than 256 KiB", None),
        ("hello", "the spec must be a mapping", 1),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_what_yaml_allows_or_forbids_ends_in_one_error(tmp_path, text, what, line):
    with pytest.raises(SpecError, match=what) as caught:
        load(tmp_path, text)
    assert line is None or str(caught.value.where) == f"spec.yaml:{line}"
    assert len(str(caught.value)) < 1000


def test_a_deep_file_is_refused_whatever_depth_python_allows(tmp_path):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        with pytest.raises(SpecError, match="nested too deeply"):
            load(tmp_path, "mesh: " + "[" * 200 + "]" * 200 + "\n")
    finally:
        sys.setrecursionlimit(before)


def test_files_that_cannot_be_read_are_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"mesh: 1\nbatch: \xff\n")
    for source, what in [("none.yaml", "there is no spec file"), (".", "is a directory"), ("binary.yaml", "UTF-8")]:
        with pytest.raises(SpecError, match=what):
            Spec.load(source)
    with pytest.raises(SpecError) as caught:
        Spec.load("none.yaml")
    assert_expected_inline(
        str(caught.value),
        """\
there is no spec file none.yaml
  at:  none.yaml
  fix: give the path of a YAML file""",
    )
    with pytest.raises(SpecError, match="a spec cannot be of type int"):
        Spec.load(5)  # pyright: ignore[reportArgumentType]
