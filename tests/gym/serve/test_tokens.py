"""Tokens: shown once, kept as hashes, checked whole, gone when revoked or expired."""

from __future__ import annotations

import json

import pytest

from drk.gym.serve.tokens import TokenBook, TokenError, create, read_records, revoke


def test_a_token_opens_what_it_was_made_for(tmp_path) -> None:
    path = tmp_path / "deep" / "tokens.json"
    text = create(path, "ci", ["evaluate"], open_limit=5, per_minute=7)
    who = TokenBook(path).check(text)
    assert (who.name, who.open_limit, who.per_minute) == ("ci", 5, 7)
    assert who.may("evaluate")
    assert not who.may("read")
    assert path.stat().st_mode & 0o777 == 0o600
    assert text not in path.read_text()
    assert text.split("_", 2)[2] not in path.read_text()


def test_an_admin_may_everything(tmp_path) -> None:
    who = TokenBook(tmp_path / "t").check(create(tmp_path / "t", "boss", ["admin"]))
    assert all(who.may(scope) for scope in ("evaluate", "profile", "read", "metrics", "admin"))


def test_wrong_tokens_open_nothing(tmp_path) -> None:
    path = tmp_path / "t"
    text = create(path, "ci")
    book = TokenBook(path)
    head, identifier, secret = text.split("_", 2)
    for wrong in ("", "x", text[:-1], text + "x", f"{head}_{identifier}_", f"{head}_000000_{secret}", secret, "\ud800"):
        assert book.check(wrong) is None, wrong
    assert book.check(text) is not None


def test_changes_are_noticed(tmp_path) -> None:
    path = tmp_path / "t"
    book = TokenBook(path)
    assert book.check("drk_a_b") is None
    first = create(path, "one")
    second = create(path, "two")
    assert book.check(first).name == "one"
    revoke(path, "one")
    assert book.check(first) is None
    assert book.check(second).name == "two"
    with pytest.raises(TokenError, match="no token named"):
        revoke(path, "one")


def test_an_expired_token_is_worthless(tmp_path) -> None:
    path = tmp_path / "t"
    text = create(path, "guest", days=1)
    assert TokenBook(path).check(text) is not None
    data = json.loads(path.read_text())
    data["tokens"][0]["expires_at"] = 1.0
    path.write_text(json.dumps(data))
    assert TokenBook(path).check(text) is None


@pytest.mark.parametrize("name", ["", "local", "a b", "x" * 65, "../up", "a\nb"])
def test_names_are_plain(tmp_path, name) -> None:
    with pytest.raises(TokenError, match="not a name"):
        create(tmp_path / "t", name)


def test_no_two_of_a_name_and_no_unknown_scope(tmp_path) -> None:
    create(tmp_path / "t", "ci")
    with pytest.raises(TokenError, match="there is a token"):
        create(tmp_path / "t", "ci")
    with pytest.raises(TokenError, match="no such scope: everything"):
        create(tmp_path / "t", "other", ["everything"])


def test_a_file_that_others_may_write_or_that_is_broken_lets_nobody_in(tmp_path) -> None:
    path = tmp_path / "t"
    text = create(path, "ci")
    path.chmod(0o666)
    with pytest.raises(TokenError, match="others may write"):
        read_records(path)
    assert TokenBook(path).check(text) is None
    path.chmod(0o600)
    path.write_text("{")
    assert TokenBook(path).check(text) is None
