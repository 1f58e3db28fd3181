"""All that is wrong with a spec comes at once, in the order of its lines; of very many errors the first are shown."""

import pickle

import pytest
from expecttest import assert_expected_inline

from passes.errors import SpecError
from tests.tools.specs import dict_error, error, load

pytestmark = pytest.mark.check


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


def test_of_very_many_errors_the_first_are_shown():
    words = dict_error(**{f"key_{n}": n for n in range(5000)}).splitlines()
    assert len(words) == 1 + 20 * 3 + 1
    assert words[-1] == "and 80 more"
