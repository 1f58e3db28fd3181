"""What is wrong with a spec: each error with its line, the nearest key or value, and a fix; several come at once."""

from __future__ import annotations

import pickle

import pytest
from expecttest import assert_expected_inline

from passes.errors import SpecError
from planner.spec.spec import Spec
from tests.tools.specs import MINIMAL, TWO_LINES, dict_error, error, load

pytestmark = pytest.mark.check


def test_unknown_key_names_the_nearest(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "tensor_paralel: {}\n"),
        """\
unknown key 'tensor_paralel'
  at:  spec.yaml:3
  fix: did you mean 'tensor_parallel'?""",
    )
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "optimizer:\n  lr: 1.0e-4\n  weightdecay: 0.1\n"),
        """\
unknown key 'weightdecay' in optimizer
  at:  spec.yaml:5
  fix: did you mean 'weight_decay'?""",
    )
    assert "known keys: tp, pp, dp" in dict_error(mesh={"xyzw": 2})
    assert_expected_inline(
        dict_error(mesh={"tpp": 2}),
        """\
unknown key 'tpp' in mesh
  at:  mesh.tpp
  fix: did you mean 'tp'?""",
    )


def test_wrong_type_says_what_was_expected(tmp_path):
    assert_expected_inline(
        error(tmp_path, "mesh:\n  tp: two\nbatch: {global: 8, micro: 2}\n"),
        """\
mesh.tp must be a whole number or auto, not the string 'two'
  at:  spec.yaml:2
  fix: write a whole number of at least 1, or auto""",
    )
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "optimizer:\n"),
        """\
optimizer must be a mapping, not nothing (null)
  at:  spec.yaml:3
  fix: write `key: value` pairs, or remove the key""",
    )
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "optimizer:\n  lr: high\n"),
        """\
optimizer.lr must be a number, not the string 'high'
  at:  spec.yaml:4
  fix: write a number at least 0, without quotes""",
    )


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"mesh": {"tp": True}}, "mesh.tp must be a whole number or auto, not true"),
        ({"mesh": {"tp": "2"}}, "mesh.tp must be a whole number or auto, not the string '2'"),
        ({"mesh": {"tp": 2.5}}, "mesh.tp must be a whole number or auto, not 2.5"),
        ({"mesh": [2, 2]}, r"mesh must be a mapping or auto, not the list \[2, 2\]"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr must be a number, not nan"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas must be a list, not 0.9"),
        ({"tensor_parallel": {"sequence_parallel": 1}}, "sequence_parallel must be true or false or auto, not 1"),
        ({"tensor_parallel": {"overrides": {3: "row"}}}, "the key 3 must be a name"),
        ({"pipeline": {"split": "even"}}, r"pipeline.split: `e` is not a layer, at character 1\n    even\n    \^\n"),
        ({"pipeline": {"split": 6}}, "pipeline.split must be a list or auto, not 6"),
        ({"inputs": {"x": {"shape": 4, "dtype": "int64"}}}, "inputs.x.shape must be a list, not 4"),
        ({"cluster": 3}, "cluster must be a string or null, not 3"),
        ({"loss": "logits"}, "loss cannot be the string 'logits'"),
    ],
)
def test_wrong_types_in_a_dict_name_the_dotted_path(keys, what):
    with pytest.raises(SpecError, match=what) as caught:
        Spec.load({**MINIMAL, **keys})
    assert str(caught.value.where).split(".")[0] == next(iter(keys))


def test_bad_value_lists_the_allowed_ones(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "optimizer:\n  schedule:\n    kind: cosin\n"),
        """\
optimizer.schedule.kind cannot be the string 'cosin'
  at:  spec.yaml:5
  fix: did you mean 'cosine'? choose one of: constant, cosine, linear, polynomial, wsd, inverse_root; or name a \
function of the step: path/file.py:function or package.module:function""",
    )
    assert_expected_inline(
        dict_error(precision={"parameters": "fp8"}),
        """\
precision.parameters cannot be the string 'fp8'
  at:  precision.parameters
  fix: choose one of: float32, bfloat16, float16, float64, null""",
    )
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "tensor_parallel:\n  overrides:\n    '*.lm_head': colum\n"),
        """\
tensor_parallel.overrides.*.lm_head cannot be the string 'colum'
  at:  spec.yaml:5
  fix: did you mean 'column'? choose one of: column, row, vocab, expert, replicate""",
    )


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"mesh": {"tp": 0}}, "mesh.tp is 0, it must be at least 1"),
        ({"batch": {"global": 0, "micro": 1}}, "batch.global is 0"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas must have 2 items, not 1"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1 is 1, it must be at least 0 and less than 1"),
        ({"optimizer": {"eps": 0}}, "optimizer.eps is 0, it must be more than 0"),
        ({"optimizer": {"zero": 4}}, "optimizer.zero cannot be 4"),
        ({"optimizer": {"zero": "auto"}}, "optimizer.zero"),
        ({"precision": {"gather": "bfloat16"}}, "precision.gather is for optimizer.zero 3, and it is 1"),
        (
            {"precision": {"gather": "bfloat16", "parameters": "bfloat16"}, "optimizer": {"zero": 3}},
            "precision.gather = bfloat16 is no smaller than bfloat16 parameters",
        ),
        ({"optimizer": {"zero": 3}, "cuda_graphs": {"impl": "emulate"}}, "zero = 3 and cuda_graphs.impl = emulate"),
        ({"optimizer": {"zero": 2, "reshard": False}}, "reshard = false is for zero 3, and optimizer.zero is 2"),
        ({"optimizer": {"zero": 0, "shard_group": 2}}, "shard_group: with zero 0 nothing is in shards"),
        ({"optimizer": {"name": "muon", "shard_group": 2}}, "shard_group: muon gathers matrices over all ranks"),
        ({"optimizer": {"schedule": {"kind": "cosine"}}}, "optimizer.schedule.steps is missing"),
        ({"optimizer": {"schedule": {"warmup": 9, "steps": 5}}}, "warmup = 9 is more than steps = 5"),
        ({"optimizer": {"schedule": {"kind": ["wsd"]}}}, "schedule.kind cannot be the list"),
        ({"optimizer": {"schedule": {"kind": "wsd", "steps": 9}}}, "schedule.decay is missing: a wsd decay needs"),
        ({"optimizer": {"schedule": {"kind": "wsd", "steps": 9, "decay": 8, "warmup": 2}}}, "more than the 7 steps"),
        ({"optimizer": {"schedule": {"kind": "linear", "steps": 9, "decay": 8}}}, "decay is not for linear"),
        ({"optimizer": {"schedule": {"power": 2}}}, "power is not for constant, which does not read it"),
        ({"optimizer": {"schedule": {"kind": "inverse_root"}}}, "warmup = 0: inverse_root decays"),
        ({"optimizer": {"schedule": {"kind": "a.py:f", "warmup": 1}}}, "warmup is not for a function of your own"),
        ({"optimizer": {"schedule": {"min_lr": 1.0}}}, "min_lr = 1 is more than optimizer.lr"),
        ({"cuda_graphs": {"scope": ["moe_preprocess"]}}, "moe_preprocess needs moe_router"),
        ({"cuda_graphs": {"scope": ["moe", "moe_router"]}}, "moe already contains moe_router"),
        ({"cuda_graphs": {"scope": ["atn"]}}, "cuda_graphs.scope.0 cannot be the string 'atn'"),
        ({"cuda_graphs": {"scope": "atn"}}, "cuda_graphs.scope must be a list or attn or mlp .* not the string 'atn'"),
        ({"cuda_graphs": {"scope": ["full_iteration", "mlp"]}}, "full_iteration already contains every part"),
        ({"cuda_graphs": {"scope": "full_iteration", "impl": "transformer_engine"}}, "captures parts of blocks"),
        (
            {"cuda_graphs": {"impl": "local", "warmup_steps": 0}},
            "cuda_graphs.warmup_steps is 0: kernels and workspaces",
        ),
        ({"inputs": {"x": {"shape": [0], "dtype": "int64"}}}, "inputs.x.shape.0 is 0"),
        ({"inputs": {"x": {"shape": [4]}}}, "inputs.x.dtype is missing"),
        ({"inputs": {"x": {"like": "x"}}}, "refer to each other in a circle"),
        ({"inputs": {"x": {"shape": [4], "dtype": "float32", "high": 3}}}, "inputs.x.high is for integers"),
        ({"mesh": {"order": "tp-dp-xp"}}, "unknown axis"),
        ({"mesh": {"pp": 2, "order": "tp-dp"}}, "pp"),
    ],
)
def test_bad_values_in_a_dict_are_named(keys, what):
    with pytest.raises(SpecError, match=what) as caught:
        Spec.load({**MINIMAL, **keys})
    assert caught.value.fix


def test_one_part_of_the_scope_may_stand_without_a_list_and_no_graphs_need_no_warmup():
    assert Spec.load({**MINIMAL, "cuda_graphs": {"scope": "full_iteration"}}).cuda_graphs.scope == ("full_iteration",)
    assert Spec.load({**MINIMAL, "cuda_graphs": {"warmup_steps": 0}}).cuda_graphs.warmup_steps == 0


@pytest.mark.parametrize(
    ("optimizer", "what"),
    [
        ({"name": "torch.optim:LBFGS"}, "LBFGS cannot update a flat tensor"),
        ({"name": "torch.optim:Adafactor"}, "updates an element by the values of others"),
        ({"name": "torch.optim:Adafactor"}, "fix: write name: adafactor"),
        ({"name": "adafactor", "options": {"foreach": True}}, "adafactor has no option foreach"),
        ({"name": "adafactor", "options": {"d": 0.5}}, "Clipping threshold d should be >= 1 but is: 0.5"),
        ({"name": "adafactor", "options": {"eps": [1e-8]}}, "adafactor's eps is a pair"),
        ({"name": "adafactor", "eps": 1e-6}, "optimizer.eps is not for adafactor"),
        ({"name": "torch.optim:NAdam"}, "keeps mu_product, a value that is not of an element"),
        ({"name": "torch.optim:RMSpro"}, "torch.optim has no RMSpro"),
        ({"name": "torch.optim:RMSprop", "options": {"alfa": 0.9}}, "does not take these options: TypeError"),
        ({"name": "torch.optim:RMSprop", "betas": [0.5, 0.6]}, "optimizer.betas is not for torch.optim:RMSprop"),
        ({"options": {"alpha": 0.9}}, "optimizer.options is not for adamw"),
    ],
)
def test_a_class_of_torch_that_cannot_run_is_one_error(optimizer, what):
    error = dict_error(optimizer=optimizer)
    assert what in error
    assert "at:  optimizer." in error
    assert "fix: " in error


def test_a_name_of_torch_that_cannot_run_says_why():
    error = dict_error(optimizer={"name": "asgd"})
    assert "cannot be the string 'asgd': torch.optim:ASGD" in error
    assert "it cannot run on the shards of ZeRO-1" in error


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("xyz", ""),
        ("adamx", "did you mean 'adam'? "),
        ("AdamW", "did you mean 'adamw'? "),
        ("rmsprop", "did you mean 'torch.optim:RMSprop'? "),
    ],
)
def test_unknown_optimizer_is_named_with_the_known_ones(name, hint):
    assert dict_error(optimizer={"name": name}).splitlines() == [
        f"optimizer.name cannot be the string '{name}'",
        "  at:  optimizer.name",
        f"  fix: {hint}choose one of: adamw, adam, sgd, lion, adagrad, muon, adafactor; or name a class of torch: "
        "torch.optim:RMSprop",
    ]


def test_everything_that_is_wrong_comes_at_once_in_the_order_of_the_lines(tmp_path):
    text = """\
optimizer: {lr: high, schedule: {kind: cosine}}
mesh: {tp: 0, pp: 2, vppp: 2}
inputs:
  ids: {shape: [4, 0]}
  labels: {like: idss}
batch: {global: 8}
precision: {parameters: fp16}
clusters: none.yaml
"""
    assert_expected_inline(
        error(tmp_path, text),
        """\
8 errors in the spec
optimizer.lr must be a number, not the string 'high'
  at:  spec.yaml:1
  fix: write a number at least 0, without quotes
optimizer.schedule.steps is missing: a cosine decay needs its last step
  at:  spec.yaml:1
  fix: add `steps: 10000`
mesh.tp is 0, it must be at least 1
  at:  spec.yaml:2
  fix: set it to 1 or more
unknown key 'vppp' in mesh
  at:  spec.yaml:2
  fix: did you mean 'vpp'?
inputs.ids.shape.1 is 0, it must be at least 1
  at:  spec.yaml:4
  fix: set it to 1 or more
batch.micro is missing
  at:  spec.yaml:6
  fix: add `micro: 2`
precision.parameters cannot be the string 'fp16'
  at:  spec.yaml:7
  fix: did you mean 'float16'? choose one of: float32, bfloat16, float16, float64, null
unknown key 'clusters'
  at:  spec.yaml:8
  fix: did you mean 'cluster'?""",
    )
    with pytest.raises(SpecError) as caught:
        load(tmp_path, text)
    assert [e.where.line for e in caught.value.errors] == [1, 1, 2, 2, 4, 6, 7, 8]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_all_that_keys_say_against_one_another_comes_at_once(tmp_path):
    text = "mesh: {pp: 2, vpp: 2, dp: 4}\nbatch: {global: 9, micro: 2}\npipeline: {split: [1, 2, 3]}\n"
    assert_expected_inline(
        error(tmp_path, text),
        """\
3 errors in the spec
mesh.vpp = 2 needs an interleaved schedule, but pipeline.schedule is 1f1b
  at:  spec.yaml:1
  fix: set pipeline.schedule: interleaved_1f1b, or mesh.vpp: 1
batch.global = 9 is not divisible by batch.micro · mesh.dp = 2 · 4 = 8
  at:  spec.yaml:2
  fix: set batch.global to 8 or 16, or change batch.micro or mesh.dp
pipeline.split has 3 stages, mesh.pp · mesh.vpp = 2 · 2 = 4
  at:  spec.yaml:3
  fix: list 4 numbers of blocks, or write auto""",
    )


def test_a_misspelt_key_is_not_also_missing(tmp_path):
    assert_expected_inline(
        error(tmp_path, "mash: {tp: 2}\nbatch: {global: 8, micr: 2}\n"),
        """\
2 errors in the spec
unknown key 'mash'
  at:  spec.yaml:1
  fix: did you mean 'mesh'?
unknown key 'micr' in batch
  at:  spec.yaml:2
  fix: did you mean 'micro'?""",
    )


def test_a_list_or_a_choice_tells_the_item_that_is_wrong():
    assert "pipeline.split.1 is 0, it must be at least 1" in dict_error(pipeline={"split": [4, 0]})
    assert "inputs.x.shape.0 must be a whole number, not the string 'a'" in dict_error(inputs={"x": {"shape": ["a"]}})
    assert "optimizer.zero cannot be true" in dict_error(optimizer={"zero": True})


def test_missing_required_keys_show_an_example(tmp_path):
    assert_expected_inline(
        error(tmp_path, "mesh: {tp: 2}\n"),
        """\
batch is missing
  at:  spec.yaml:1
  fix: add `batch: {global: 16, micro: 2}`""",
    )
    assert_expected_inline(
        error(tmp_path, "mesh: {tp: 2}\nbatch:\n  global: 8\n"),
        """\
batch.micro is missing
  at:  spec.yaml:2
  fix: add `micro: 2`""",
    )
    assert_expected_inline(
        error(tmp_path, "# nothing yet\n"),
        """\
the spec is empty
  at:  spec.yaml:1
  fix: give at least mesh, batch and inputs""",
    )


def test_a_batch_that_does_not_divide_gives_the_nearest_sizes(tmp_path):
    assert_expected_inline(
        error(tmp_path, "mesh: {tp: 2, dp: 4}\nbatch:\n  global: 13\n  micro: 2\n"),
        """\
batch.global = 13 is not divisible by batch.micro · mesh.dp = 2 · 4 = 8
  at:  spec.yaml:3
  fix: set batch.global to 8 or 16, or change batch.micro or mesh.dp""",
    )
    assert "set batch.global to 8," in dict_error(mesh={"dp": 4}, batch={"global": 3, "micro": 2})


def test_virtual_stages_need_a_pipeline_and_an_interleaved_schedule(tmp_path):
    assert_expected_inline(
        error(tmp_path, "mesh:\n  vpp: 2\nbatch: {global: 8, micro: 2}\n"),
        """\
vpp = 2 splits each pipeline rank into chunks, but there is no pipeline (pp = 1)
  at:  spec.yaml:2
  fix: set vpp to 1, or pp to 2 or more""",
    )
    assert_expected_inline(
        error(tmp_path, "mesh:\n  pp: 2\n  vpp: 2\nbatch: {global: 8, micro: 2}\n"),
        """\
mesh.vpp = 2 needs an interleaved schedule, but pipeline.schedule is 1f1b
  at:  spec.yaml:3
  fix: set pipeline.schedule: interleaved_1f1b, or mesh.vpp: 1""",
    )
    spec = Spec.load({**MINIMAL, "mesh": {"pp": 2, "vpp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}})
    assert spec.mesh.vpp == 2


def test_a_split_has_one_number_for_each_stage(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "pipeline:\n  schedule: 1f1b\n  split: [4, 4, 4]\n"),
        """\
pipeline.split has 3 stages, mesh.pp · mesh.vpp = 2 · 1 = 2
  at:  spec.yaml:5
  fix: list 2 numbers of blocks, or write auto""",
    )
    assert Spec.load({**MINIMAL, "mesh": {"pp": 2}, "pipeline": {"split": [5, 7]}}).pipeline.split == (5, 7)


def test_like_must_name_an_input(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "inputs:\n  ids: {shape: [4], dtype: int64}\n  labels: {like: input_ids}\n"),
        """\
inputs.labels.like names no input: 'input_ids'
  at:  spec.yaml:5
  fix: name one of the inputs: ids, labels""",
    )


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
  fix: give the path of a YAML file, or a dict""",
    )
    with pytest.raises(SpecError, match="a spec cannot be of type int"):
        Spec.load(5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"mesh": {"tp": 10**30}}, "mesh.tp is 1000000000000000000000000000000, it must be .* at most 1099511627776"),
        ({"mesh": {"tp": 10**5000}}, "mesh.tp is a number of 16610 bits, it must be"),
        ({"mesh": {"tp": 2_000_000}}, "tp is more than 1048576, the maximum number of ranks"),
        ({"mesh": {"tp": 1 << 19, "dp": 4}}, "world size is more than 1048576"),
        ({"mesh": {"tp": [10**5000]}}, r"must be a whole number or auto, not the list \[a number of"),
        ({"inputs": {"x": {"shape": [1] * 17, "dtype": "int64"}}}, "inputs.x.shape has 17 entries, it may have 16"),
        ({"inputs": {"x": {"shape": [1 << 39], "dtype": "int64"}}}, "a global batch of 4.4e.12 elements, more than"),
        (
            {"tensor_parallel": {"overrides": {f"{n}": "row" for n in range(1001)}}},
            "has 1001 entries, it may have 1000",
        ),
        ({"inputs": {f"{n}": {"like": f"{n - 1}"} for n in range(129)}}, "inputs has 129 entries, it may have 128"),
        ({"pipeline": {"split": [10**13, 1]}}, "pipeline.split.0 is 10000000000000, it must be"),
        ({"pipeline": {"split": "E" + "(" * 101}}, "brackets are nested more than 100 deep"),
        ({"cuda_graphs": {"scope": ["attn"] * 99}}, "has 99 entries, it may have 12"),
        ({"optimizer": {"lr": "x" * 5000}}, "optimizer.lr must be a number, not the string 'x+…x+'"),
        ({"x" * 5000: 1}, "unknown key 'x+…x+'"),
        ({"optimizer": {"bucket_size": -(10**400)}}, "optimizer.bucket_size is a number of"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value))[:9],
)
def test_sizes_that_no_machine_has_are_refused_in_few_words(keys, what):
    with pytest.raises(SpecError, match=what) as caught:
        Spec.load({**MINIMAL, **keys})
    assert len(str(caught.value)) < 1000


def test_of_very_many_errors_the_first_are_shown():
    words = dict_error(**{f"key_{n}": n for n in range(5000)}).splitlines()
    assert len(words) == 1 + 20 * 3 + 1
    assert words[-1] == "and 80 more"
