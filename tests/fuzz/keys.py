"""For any parts, keys are bounded printable ASCII, and different inputs have different keys."""

from __future__ import annotations

from random import Random

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.keys import MAX_KEY_LENGTH, Key, KeySpace, downstream_key
from integr8s_idem.keys.fingerprints import _rfc8785_json, canonical_json
from tests.campaigns.figures import Figures
from tests.fuzz.mutators import text, value


def keyed(random: Random) -> Figures:
    """Compare the keys of two similar tuples of parts."""
    one = [text(random) or "x" for _ in range(5)]
    other = _nearly(random, one)
    keys = []
    for scope, *parts in (one, other):
        space = KeySpace("idempotency", scope, hash_keys=random.random() < 0.1)
        by_event, by_caller = Key.of_event(*parts), Key.of(":".join(parts))
        assert by_event.text != by_caller.text
        for full in (space.full(by_event), space.full(by_caller), downstream_key(space.full(by_event), parts[0])):
            assert full.isascii(), ascii(full)
            assert full.isprintable(), ascii(full)
            assert not set("{}*?[] ") & set(full), ascii(full)
            assert len(full) <= MAX_KEY_LENGTH, ascii(full)
        keys.append(KeySpace("idempotency", scope).full(by_event))
    assert (keys[0] == keys[1]) == (one == other), f"{one!a} and {other!a} make {keys}"
    return Figures(keys=1)


def _nearly(random: Random, parts: list[str]) -> list[str]:
    """Move a character from one part to the next, or make another small change."""
    parts = list(parts)
    at = random.randrange(4)
    match random.randrange(4):
        case 0:
            whole = f"{parts[at]}{random.choice((':', '', '%3A'))}{parts[at + 1]}"
            cut = random.randint(0, len(whole))
            parts[at : at + 2] = [whole[:cut] or "x", whole[cut:] or "x"]
        case 1:
            parts[at] += random.choice((" ", "\0", ":", "\u0301", "%", "x"))
        case 2:
            parts[at], parts[at + 1] = parts[at + 1], parts[at]
    return parts


def canonical(random: Random) -> Figures:
    """Compare the canonical forms of two similar values, which are equal if and only if the values are."""
    one = value(random)
    other = value(Random(random.randrange(50))) if random.random() < 0.5 else _other_order(one)
    try:
        forms = [canonical_json(each) for each in (one, other)]
    except InvalidKeyError:
        return Figures(no_canonical_form=1)
    assert forms == [_rfc8785_json(each) for each in (one, other)], f"{one!a} and {other!a}"
    assert (forms[0] == forms[1]) == (_exact(one) == _exact(other)), f"{one!a} and {other!a}"
    return Figures(canonical=1)


def _other_order(given: object) -> object:
    if isinstance(given, dict):
        return {name: _other_order(given[name]) for name in reversed(list(given))}
    return [_other_order(item) for item in given] if isinstance(given, list) else given


def _exact(given: object) -> str:
    """Return equal texts for equal JSON values: 1, 1.0 and 1e0, or 0 and -0.0, but not 1 and true."""
    if isinstance(given, dict):
        return "{" + ",".join(f"{name!r}:{_exact(given[name])}" for name in sorted(given)) + "}"
    if isinstance(given, list):
        return "[" + ",".join(map(_exact, given)) + "]"
    if isinstance(given, float) and given.is_integer() and abs(given) < 2**53:
        return repr(int(given))
    return repr(given)
