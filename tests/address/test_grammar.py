import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenterhook.address.globs import path_regex
from tenterhook.address.grammar import Address, Choice, Inner, Pattern, Range, Wild, escape, parse
from tenterhook.errors import AddressError

SPECIAL = "\\:#*{}[](),.'\" ab01-"
names = st.text(st.sampled_from(SPECIAL) | st.characters(codec="utf-8"), min_size=1, max_size=6)
ranges = st.builds(Range, st.integers(-20, 20), st.integers(-20, 20))


def joined(pieces):
    """What a reader would have made of them: no two literals, and no two stars, side by side."""
    kept = []
    for piece in pieces:
        if kept and isinstance(piece, str) and isinstance(kept[-1], str):
            kept[-1] += piece
        elif not (kept and piece is kept[-1] is Wild.ANY):
            kept.append(piece)
    return Pattern(tuple(kept))


def patterns(pieces, min_size=1):
    return st.lists(pieces, min_size=min_size, max_size=3).map(joined)


def choices(pieces):
    options = st.lists(patterns(pieces, min_size=0), min_size=1, max_size=3).map(tuple)
    return options.filter(lambda found: found != (Pattern(()),)).map(Choice)


pieces = st.recursive(names | st.just(Wild.ANY) | ranges, choices, max_leaves=4)
segments = patterns(pieces) | st.just(Pattern((Wild.DEEP,)))
literals = names.map(lambda name: Pattern((name,)))
places = st.none() | st.integers(-3, 30)


@st.composite
def inners(draw):
    """A chain as a reader gives it back: calls, then anything but a plain ``return``, which is left out."""
    chain = [
        Inner(name, is_call=True, place=place)
        for name, place in draw(st.lists(st.tuples(patterns(pieces), places), max_size=2))
    ]
    last = draw(st.none() | st.builds(Inner, patterns(pieces), st.booleans(), places))
    chain += [] if last is None else [last]
    keywords = (Pattern(("in",)), Pattern(("return",)))
    return tuple(inner for inner in chain if inner.name not in keywords)


addresses = st.builds(Address, st.lists(segments, max_size=4).map(tuple), inners(), st.none() | st.integers(-5, 1000))


@given(addresses)
def test_every_address_is_read_back_from_its_text(address):
    assert parse(str(address)) == address


@given(st.text(SPECIAL + "in", max_size=12))
def test_text_is_refused_with_an_address_error_or_has_a_stable_canonical_form(text):
    try:
        address = parse(text)
    except AddressError:
        return
    assert parse(str(address)) == address
    assert str(parse(str(address))) == str(address)


@given(st.lists(names.map(lambda name: name.replace(".", "_")), min_size=1, max_size=4))
def test_an_escaped_name_stands_for_itself(parts):
    address = parse(escape(".".join(parts)))
    assert address.names == tuple(parts)
    assert address.is_literal


def fits_text(pieces, text):
    """A matcher that knows no regular expressions: it tries every way to cut the text."""
    if not pieces:
        return not text
    first, rest = pieces[0], pieces[1:]
    return any(stands_for(first, text[:cut]) and fits_text(rest, text[cut:]) for cut in range(len(text) + 1))


def stands_for(piece, text):
    if piece is Wild.ANY:
        return True
    if isinstance(piece, Range):
        low, high = sorted((piece.first, piece.last))
        return any(text == str(number) for number in range(low, high + 1))
    if isinstance(piece, Choice):
        return any(fits_text(option.pieces, text) for option in piece.options)
    return piece == text


def fits_path(path, segments):
    if not path:
        return not segments
    if path[0].pieces == (Wild.DEEP,):
        return any(fits_path(path[1:], segments[skipped:]) for skipped in range(len(segments) + 1))
    return bool(segments) and fits_text(path[0].pieces, segments[0]) and fits_path(path[1:], segments[1:])


small = st.text("ab1", min_size=1, max_size=2)
small_pieces = st.recursive(small | st.just(Wild.ANY) | st.builds(Range, st.integers(0, 2), st.integers(0, 2)), choices)
small_paths = st.lists(patterns(small_pieces) | st.just(Pattern((Wild.DEEP,))), min_size=1, max_size=3).map(tuple)


@given(small_paths, st.lists(small, max_size=4))
def test_a_glob_matches_what_trying_every_cut_matches(path, segments):
    assert bool(re.fullmatch(path_regex(path), ".".join(segments))) == fits_path(path, segments)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("layer4.1.conv2", "layer4.1.conv2"),
        ("layer4.1.conv2:return", "layer4.1.conv2"),
        (":return", ":return"),
        ("", ":return"),
        ("#2", ":return#2"),
        (":in", ":in"),
        ("h.3.attn:softmax()[2]#-1", "h.3.attn:softmax()[2]#-1"),
        ("attn:f():return", "attn:f()"),
        ('attn:out["x"]', 'attn:out["x"]'),
        ("attn:out[:, 0]#3", "attn:out[:, 0]#3"),
        ("attn:self.cache[1]", "attn:self.cache[1]"),
        ("h.{08..4}", "h.{8..4}"),
        ("a\\b", "ab"),
        ("cell#007", "cell#7"),
    ],
)
def test_canonical_text(text, canonical):
    assert str(parse(text)) == canonical


def test_a_chain_of_names_inside_calls_is_read_in_order():
    address = parse("h.3.attn:eager_attention_forward():attn_weights")
    call, variable = address.inner
    assert (call.name.literal, call.is_call) == ("eager_attention_forward", True)
    assert (variable.name.literal, variable.is_call) == ("attn_weights", False)


def test_an_integer_in_brackets_is_a_place_and_anything_else_belongs_to_the_name():
    assert parse("a:x[2]").inner == (Inner(Pattern(("x",)), place=2),)
    assert parse('a:x["2"]').inner == (Inner(Pattern(('x["2"]',))),)
    assert parse("a:x[0][1]").inner == (Inner(Pattern(("x[0]",)), place=1),)


def test_a_subscript_of_an_integer_can_be_escaped():
    assert parse("a:x\\[0\\]").inner == (Inner(Pattern(("x[0]",))),)


def test_parsing_twice_gives_the_very_same_object():
    assert parse("h.*.attn") is parse("h.*.attn")


@pytest.mark.parametrize("text", ["h.*", "**", "h.{1..2}", "{a,b}", "h:*", "h.{a}"])
def test_a_glob_anywhere_is_not_literal(text):
    assert not parse(text).is_literal


@pytest.mark.parametrize("text", ["h.3", "h.3:in#2", ":return", "h\\*"])
def test_an_address_without_globs_is_literal(text):
    assert parse(text).is_literal


@pytest.mark.parametrize(
    ("text", "column", "fix"),
    [
        ("h..3", 2, "one name"),
        (".h", 0, "one name"),
        ("h.", 2, "one name"),
        ("a**", 1, "between dots"),
        ("h.***", 2, "between dots"),
        ("a:**", 2, "a part of a name"),
        ("a:", 2, "'return'"),
        ("a:x:y", 3, "name()"),
        ("a:f(x)", 3, "name()"),
        ("a:f()x", 5, "Continue with"),
        ("a:in()", 2, "':in'"),
        ("a:x[", 3, "\\["),
        ("a:x]", 3, "\\]"),
        ("a}", 1, "\\}"),
        ("h.{1", 2, "\\{"),
        ("h.{}", 2, "{a,b}"),
        ("h.{1..3,5}", 4, "{{1..3},5}"),
        ("h.{0..99999}", 2, "narrower"),
        ("cell#5:h", 4, "cell:h#5"),
        ("cell#", 4, "cell:h#5"),
        ("cell#x", 4, "cell:h#5"),
        ("a\\", 1, "\\\\"),
    ],
)
def test_malformed_text_is_shown_with_a_caret_and_the_fix(text, column, fix):
    with pytest.raises(AddressError) as caught:
        parse(text)
    what, shown, caret, advice = str(caught.value).split("\n")
    assert repr(text) in what
    assert shown == f"    {text}"
    assert caret.index("^") == column + 4
    assert fix in advice


def test_an_alternative_can_hold_a_range_and_further_alternatives():
    assert parse("h.{{1..3},{a,b}c}").path[1] == Pattern(
        (Choice((Pattern((Range(1, 3),)), Pattern((Choice((Pattern(("a",)), Pattern(("b",)))), "c")))),)
    )
