from __future__ import annotations

import pytest

from drk.gym.module_names import package_top, place_module

FILES = {
    "a/__init__.py",
    "a/b/__init__.py",
    "a/b/net.py",
    "loose/net.py",
    "net.py",
    "src/p/__init__.py",
    "src/p/net.py",
}


@pytest.mark.parametrize(
    ("entry", "name", "first"),
    [
        ("net.py", "net", "."),
        ("a/b/net.py", "a.b.net", "."),
        ("a/b/__init__.py", "a.b", "."),
        ("src/p/net.py", "p.net", "src"),
        ("loose/net.py", "net", "loose"),
        ("a/b/my-net.py", "a.b.my_net", "."),
        ("my-net.py", "drk_entry_my_net", "."),
        ("1.py", "drk_entry__1", "."),
    ],
)
def test_names_and_search_paths(entry, name, first):
    place = place_module(entry, FILES | {entry})
    assert (place.name, place.search[0], place.synthetic) == (name, first, "")
    assert {".", "src"} <= set(place.search)
    assert all(part.isidentifier() for part in place.name.split("."))


def test_names_that_are_taken_are_left_alone():
    assert place_module("net.py", FILES, taken={"net"}).name == "drk_entry_net"


def test_relative_imports_make_a_package_of_any_folder():
    assert place_module("loose/net.py", FILES, relative=True).name == "loose.net"
    place = place_module("net.py", FILES, relative=True)
    assert place.name == f"{place.synthetic}.net"
    assert place.synthetic


def test_package_tops():
    assert package_top("a/b/net.py", FILES) == "."
    assert package_top("src/p/net.py", FILES) == "src"
    assert package_top("loose/net.py", FILES) == "loose"
