"""What is measured of a node, in its file."""

from __future__ import annotations

from hpcsched.cli.admin.node import gpu_keys, measured_keys, with_keys


def test_measured_keys_go_into_the_place_of_their_lines() -> None:
    text = '# How fast.\n#speed = 0\nhost = "h"\nlink_mbps = 100\n'
    assert with_keys(text, {"speed": 1.25, "link_mbps": 1000, "tmp_disk": "5G"}) == (
        '# How fast.\nspeed = 1.25\nhost = "h"\nlink_mbps = 1000\ntmp_disk = "5G"\n'
    )


def test_what_was_not_found_out_is_left_as_it_is() -> None:
    assert measured_keys({"speed": 1.5, "link_mbps": 0}) == {"speed": 1.5}
    assert measured_keys({"tmp_total_mib": 2048}) == {"tmp_disk": "2G"}


def test_a_gpu_that_is_cut_up_is_its_devices() -> None:
    whole = {"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-1", "mig": []}
    cut = {"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-2", "mig": [{"profile": "1g.10gb", "uuid": "MIG-1"}]}
    assert gpu_keys([whole]) == {"gpus": ["h100"]}
    assert gpu_keys([whole, cut]) == {"gpus": ["h100", "1g.10gb"], "gpu_devices": ["GPU-1", "MIG-1"]}


def test_a_card_is_kept_if_its_address_is_one() -> None:
    assert measured_keys({"mac": "52:54:00:12:34:56"}) == {"mac": "52:54:00:12:34:56"}
    for rubbish in ("", "00:00:00:00:00:00", 7, ["x"], '"\n[x]'):
        assert measured_keys({"mac": rubbish}) == {}
