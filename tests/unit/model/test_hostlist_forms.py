"""Host lists as they stand in scripts and in what Slurm shows."""

from __future__ import annotations

import pytest

from hpcsched.errors import RequestError
from hpcsched.model.hostlist import MAX_NAMES, compress_hostlist, expand_hostlist


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[01-03,7],gpu1", ["n01", "n02", "n03", "n7", "gpu1"]),
        ("c06b06n[01-02]", ["c06b06n01", "c06b06n02"]),
        ("a,b-12", ["a", "b-12"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[8-11]x", ["n8x", "n9x", "n10x", "n11x"]),
        ("[1-3]", ["1", "2", "3"]),
        ("n1 n2,,n1\n", ["n1", "n2", "n1"]),
        ("a.example.org", ["a.example.org"]),
    ],
)
def test_a_list_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["n1"], "n1"),
        (["tn1", "tn2"], "tn[1-2]"),
        (["n1", "n3", "n4", "n5"], "n[1,3-5]"),
        (["n2", "n1"], "n[2,1]"),
        (["n09", "n10"], "n[09-10]"),
        (["n9", "n10"], "n[9-10]"),
        (["n1", "gpu1", "n2"], "n1,gpu1,n2"),
        (["a", "b1", "b2"], "a,b[1-2]"),
        (["n" + "1" * 30], "n" + "1" * 30),
    ],
)
def test_names_are_compressed_in_their_order(names: list[str], text: str) -> None:
    assert compress_hostlist(names) == text


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n1]", "n[[1]]", "n[]", "n[a-b]", "n[3-1]", "n[1-2-3]", "n[1 ,2]", "n[-1]", "n\0", "a\x1bb", "n[٣]"],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="cannot read host list"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    "text", ["n[0-999999999]", "a[1-9][1-9][1-9][1-9][1-9][1-9]", "n[0-65536]", "n[0-999999999999999999]" * 2]
)
def test_a_bomb_is_refused_before_it_is_expanded(text: str) -> None:
    with pytest.raises(RequestError, match=f"the most is {MAX_NAMES}"):
        expand_hostlist(text)


def test_the_largest_list_is_expanded() -> None:
    assert len(expand_hostlist("n[0-65535]")) == MAX_NAMES


@pytest.mark.parametrize("name", ["", "a,b", "a[1]", "a b", "a\n"])
def test_a_name_that_would_be_read_as_another_is_not_written(name: str) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        compress_hostlist([name])
