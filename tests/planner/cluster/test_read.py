"""A cluster file: what is read of it, and what is wrong with it, all at once and each with its line."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from expecttest import assert_expected_inline

from passes.errors import SpecError
from planner.cluster.cluster import Cluster, Device, Link, read_cluster
from planner.spec.cluster import shipped_cluster, shipped_names
from planner.spec.fields import json_schema
from tests.tools.paths import ROOT

GOOD = """\
name: two-nodes
device:
  name: D
  flops: {float32: 10.0e12, float16: 80.0e12}
  memory: 16.0e9
  bandwidth: 900.0e9
links:
  - {name: inside, devices: 8, bandwidth: 100.0e9, latency: 5.0e-6}
  - {name: outside, devices: 16, bandwidth: 12.5e9, latency: 10.0e-6}
"""


def read(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return read_cluster(str(path))


def error(tmp_path: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    return str(caught.value)


def test_a_good_file_is_read_whole(tmp_path):
    cluster = read(tmp_path, GOOD)
    assert (cluster.name, cluster.devices, cluster.device.memory) == ("two-nodes", 16, 16_000_000_000)
    assert cluster.device.flops == {"float32": 10e12, "float16": 80e12}
    assert [link.devices for link in cluster.links] == [8, 16]
    assert cluster == Cluster.model_validate(yaml.safe_load(yaml.safe_dump(cluster.to_dict())))
    assert list(cluster.warnings()) == []


def test_what_is_said_of_a_cluster_later_names_the_line(tmp_path):
    cluster = read(tmp_path, GOOD)
    assert str(cluster.error("device.flops.bfloat16", "no peak").where) == "cluster.yaml:4"
    assert str(cluster.error("links.1.bandwidth", "slow").where) == "cluster.yaml:9"


def test_everything_wrong_is_told_at_once_in_the_order_of_lines(tmp_path):
    text = """\
name: two-nodes
device:
  name: D
  flops: {fp16: 80.0e12, float32: 3, bfloat16: 1.0e25}
  memory: 80
  bandwith: 900.0e9
  product_fraction: 1.2
  launch: 5
links:
  - {name: inside, devices: 8, bandwidth: 100, latency: 5.0e-6}
  - {name: outside, devices: many, latency: 10.0e-6}
ovrlap: 0.5
"""
    assert_expected_inline(
        error(tmp_path, text),
        """\
11 errors in the cluster file
unknown key 'fp16' in device.flops
  at:  cluster.yaml:4
  fix: did you mean 'float16'?
device.flops.float32 is 3 FLOP/s: no machine has less than 1e+08
  at:  cluster.yaml:4
  fix: write FLOP/s: a TFLOP/s is 1.0e12
device.flops.bfloat16 is 1e+25 FLOP/s: no machine has more than 1e+18
  at:  cluster.yaml:4
  fix: write FLOP/s: a TFLOP/s is 1.0e12
device.memory is 80 bytes: no machine has less than 1e+07
  at:  cluster.yaml:5
  fix: write bytes: a GB is 1.0e9
unknown key 'bandwith' in device
  at:  cluster.yaml:6
  fix: did you mean 'bandwidth'?
device.product_fraction is 1.2, it must be more than 0 and at most 1
  at:  cluster.yaml:7
  fix: choose a number more than 0 and at most 1
device.launch is 5 seconds: no machine has more than 1
  at:  cluster.yaml:8
  fix: write seconds: a microsecond is 1.0e-6
links.0.bandwidth is 100 bytes per second: no machine has less than 100000
  at:  cluster.yaml:10
  fix: write bytes per second: a GB/s is 1.0e9
links.1.devices must be a whole number, not the string 'many'
  at:  cluster.yaml:11
  fix: write a whole number of at least 1
links.1.bandwidth is missing
  at:  cluster.yaml:11
  fix: add `bandwidth: 450000000000.0`
unknown key 'ovrlap'
  at:  cluster.yaml:12
  fix: did you mean 'overlap'?""",
    )


@pytest.mark.parametrize(
    ("devices", "what", "fix"),
    [
        (12, "links.1.devices = 12 is not a multiple of the 8 devices of the link before it", "set it to 8 or 16"),
        (8, "links.1.devices is 8, but the link before it already joins 8", "list links from the inside outwards"),
        (4, "links.1.devices is 4, but the link before it already joins 8", "list links from the inside outwards"),
    ],
)
def test_a_link_joins_whole_groups_of_the_one_before(tmp_path, devices, what, fix):
    message = error(tmp_path, GOOD.replace("devices: 16", f"devices: {devices}").replace("16.0e9", "16"))
    assert what in message
    assert "cluster.yaml:9" in message
    assert fix in message
    assert "device.memory is 16 bytes" in message  # the device is checked beside the links, not before them


def test_a_bandwidth_that_grows_outwards_is_a_warning_at_its_line(tmp_path):
    (warning,) = read(tmp_path, GOOD.replace("12.5e9", "100.0e10")).warnings()
    assert "outside carries 1e+12 bytes per second per device, more than inside" in warning.what
    assert str(warning.where) == "cluster.yaml:9"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{float32: 10.0e12, float16: 80.0e12}", "{}", "device.flops is empty"),
        ("{float32: 10.0e12, float16: 80.0e12}", "{float32: 1.0e12, float32: 2.0e12}", "'float32' is given twice"),
        ("{float32: 10.0e12, float16: 80.0e12}", "{float32: .nan}", "device.flops.float32 must be a number, not nan"),
        ("{float32: 10.0e12, float16: 80.0e12}", "{float32: fast}", "must be a number, not the string 'fast'"),
        ("memory: 16.0e9", "memory: 16.5", "device.memory must be a whole number, not 16.5"),
        ("memory: 16.0e9", "memory: -1", "device.memory is -1 bytes: no machine has less than 1e+07"),
        ("latency: 5.0e-6", "latency: 0", "links.0.latency is 0 seconds: no machine has less than 1e-09"),
        ("latency: 5.0e-6", "latency: .inf", "links.0.latency must be a number, not inf"),
        ("devices: 8", "devices: 1.0e9", "links.0.devices is 1e+09 devices: no machine has more than 1e+08"),
        ("name: inside, ", "", "links.0.name is missing"),
        ("name: two-nodes", "name: 3", "name must be a string, not 3"),
    ],
)
def test_an_absurd_value_is_an_error_that_names_its_key(tmp_path, old, new, words):
    assert old in GOOD
    assert words in error(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize("section", ["device", "links", "name"])
def test_a_section_that_is_missing_is_shown_by_an_example(tmp_path, section):
    value: dict[str, Any] = yaml.safe_load(GOOD)
    del value[section]
    assert f"{section} is missing" in error(tmp_path, yaml.safe_dump(value))


def test_no_links_are_an_error(tmp_path):
    assert "links is empty" in error(tmp_path, GOOD[: GOOD.index("links")] + "links: []\n")


@pytest.mark.parametrize("text", ["", "- 1\n", "3\n"])
def test_a_file_that_is_no_mapping_is_an_error(tmp_path, text):
    assert "the cluster file is not a mapping" in error(tmp_path, text)


def test_a_path_that_is_not_there_names_the_nearest_shipped_cluster():
    with pytest.raises(SpecError) as caught:
        read_cluster("dgx-h10")
    assert "did you mean dgx-h100?" in str(caught.value)
    with pytest.raises(SpecError, match="there is no file"):
        read_cluster("x" * 5000)


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_cluster_is_found_by_its_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = read_cluster(name)
    assert cluster.name == name
    assert cluster == read_cluster(f"specs/clusters/{name}.yaml") == read_cluster(f"{name}.yaml")
    assert list(cluster.warnings()) == []


def test_only_a_name_or_the_path_in_the_package_means_a_shipped_cluster():
    assert shipped_cluster("elsewhere/dgx-h100.yaml") is None
    assert shipped_cluster("dgx-h100.json") is None
    assert shipped_cluster("/dgx-h100") is None


def test_clusters_of_the_papers_have_the_devices_that_these_used():
    assert {name: read_cluster(name).devices for name in shipped_names()} == {
        "cpu-local": 4,
        "dgx-2h": 1536,
        "dgx-a100": 3072,
        "dgx-h100": 16384,
        "h200": 1024,
    }


def test_the_schema_explains_every_key_and_holds_the_limits():
    schema = json_schema(Cluster, "A meshwright cluster file")
    device = schema["$defs"]["Device"]["properties"]
    assert all(
        "description" in value for section in schema["$defs"].values() for value in section["properties"].values()
    )
    assert device["memory"]["minimum"] == 10**7
    assert schema["title"] == "A meshwright cluster file"


def test_the_page_about_cluster_files_names_every_key():
    page = (ROOT / "docs" / "clusters.md").read_text()
    keys = [*(f"device.{k}" for k in Device.model_fields), *(f"links.{k}" for k in Link.model_fields), "overlap"]
    assert [key for key in keys if f"`{key}`" not in page and not key.endswith(".name")] == []


def test_equality_asks_for_values_not_for_lines(tmp_path):
    cluster = read(tmp_path, GOOD)
    assert cluster == read(tmp_path, "\n\n" + GOOD)
    assert cluster != cluster.model_copy(update={"overlap": 0.5})
    assert copy.deepcopy(cluster) == cluster
