"""What is wrong with a spec: each error with its line, the nearest key or value, and a fix; more of them at once, and
what keys say against one another: test_several_errors.py."""

import pytest
from expecttest import assert_expected_inline

from passes.errors import SpecError
from planner.spec.spec import Spec
from tests.tools.specs import MINIMAL, TWO_LINES, dict_error, error

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
        ({"optimizer": {"lr": 0.0, "groups": {"head*": {"lr": 0.1}}}}, "a group's rate is in proportion to"),
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
        ({"name": "adafactor"}, "torch.optim:Adafactor updates an element by the values of others"),
        ({"name": "adafactor"}, "fix: choose adamw, muon, or a class that updates each element by itself"),
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
        f"  fix: {hint}choose one of: adamw, adam, sgd, lion, adagrad, schedule_free_adamw, muon; or name a class of "
        "torch: torch.optim:RMSprop",
    ]


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ({"optimizer": {"zero": "3"}}, "3"),
        ({"batch": {"global": "4", "micro": 2}}, "4"),
        ({"optimizer": {"weight_decay": "0.1"}}, "0.1"),
        ({"tensor_parallel": {"sequence_parallel": "true"}}, "true"),
    ],
)
def test_a_value_that_is_right_without_quotes_is_told_so(keys, value):
    with pytest.raises(SpecError) as caught:
        Spec.load(MINIMAL | keys)
    assert caught.value.fix == f"write {value}, without quotes"


def test_documents_longer_than_a_sequence_are_refused():
    inputs = {"position_ids": {"shape": [32], "dtype": "int64", "high": 9}}
    with pytest.raises(SpecError, match="mean_document is 33, and a sequence has 32 tokens"):
        Spec.load(MINIMAL | {"inputs": inputs, "data": {"packing": "documents", "mean_document": 33}})


def test_documents_longer_than_one_of_several_lengths_are_cut_to_it():
    inputs = {"position_ids": {"shape": [[32, 128]], "dtype": "int64", "high": 9}}
    spec = Spec.load(MINIMAL | {"inputs": inputs, "data": {"packing": "documents", "mean_document": 66}})
    assert [spec.at(place).data.mean_document for place in (0, 1)] == [32, 66]
    assert Spec.load(spec.at(0).to_dict()) == spec.at(0)


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
        error(tmp_path, "# nothing yet\n"),
        """\
the spec is empty
  at:  spec.yaml:1
  fix: give at least mesh, batch and inputs""",
    )


def test_a_batch_that_is_smaller_than_one_of_each_rank_gives_the_nearest_size():
    assert "set batch.global to 8," in dict_error(mesh={"dp": 4}, batch={"global": 3, "micro": 2})


def test_virtual_stages_need_a_pipeline_and_an_interleaved_schedule(tmp_path):
    assert_expected_inline(
        error(tmp_path, "mesh:\n  vpp: 2\nbatch: {global: 8, micro: 2}\n"),
        """\
vpp = 2 splits each pipeline rank into chunks, but there is no pipeline (pp = 1)
  at:  spec.yaml:2
  fix: set vpp to 1, or pp to 2 or more""",
    )
    spec = Spec.load({**MINIMAL, "mesh": {"pp": 2, "vpp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}})
    assert spec.mesh.vpp == 2


def test_a_split_has_one_number_for_each_stage():
    assert Spec.load({**MINIMAL, "mesh": {"pp": 2}, "pipeline": {"split": [5, 7]}}).pipeline.split == (5, 7)


def test_like_must_name_an_input(tmp_path):
    assert_expected_inline(
        error(tmp_path, TWO_LINES + "inputs:\n  ids: {shape: [4], dtype: int64}\n  labels: {like: input_ids}\n"),
        """\
inputs.labels.like names no input: 'input_ids'
  at:  spec.yaml:5
  fix: name one of the inputs: ids, labels""",
    )


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
