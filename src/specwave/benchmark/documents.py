"""Long documents written by rule: the logbook of a ferry company, with what there is to ask about it.

A logbook is a list of entries, one a day. Every entry states facts (boat, captain, harbours, passengers, cargo) and
something that counts for nothing, so that there is text to pass over. A document holds the first n entries: any length
can be cut, and the answer to a question is counted from the entries that are in it.

Knows nothing of tokens, models or files.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

BOATS = ("Heron", "Kittiwake", "Marigold", "Old Constance", "Petrel", "Saint Olave", "Tamarind", "Wayfarer")
CAPTAINS = ("Abel Quist", "Dora Lindqvist", "Ezra Pell", "Hanne Sorby", "Ivo Marsh", "Ruth Calloway", "Tobias Wren")
HARBOURS = ("Ashmouth", "Brindle Quay", "Corran", "Dunlin Bay", "Eastholm", "Farrow Point", "Gannet Rock", "Holm Sound")
CARGOES = ("barley", "dried cod", "lamp oil", "roof slate", "salt", "timber", "wool")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEATHER = (
    "The wind was light from the south-west and the crossing was an easy one.",
    "Fog lay on the water until noon, and the bell was rung every two minutes.",
    "A short, steep sea made most of the passengers go below.",
    "It rained without a pause, but nobody on board complained of anything except the soup.",
    "The evening was so clear that both lighthouses could be seen at once.",
    "A hard frost had made the deck slippery, so ashes were strewn before anyone came aboard.",
    "The tide ran stronger than the almanac had promised, and the arrival was late.",
    "There was hardly any wind, and the engine was spared for the last mile only.",
)
EVENTS = (
    "A schoolmaster asked to see the chart and was shown it by the mate.",
    "One of the lifebelts was found to be perished and was marked for replacement.",
    "The steward noted that the tea had again been delivered without sugar.",
    "A dog that belonged to nobody went ashore with the mail.",
    "The harbour master came aboard, looked at the papers and had nothing to add.",
    "Two fiddlers played on the after deck and were asked to go on.",
    "The paint on the port bow, put on in spring, is already lifting.",
    "A letter for the company's office was handed over and is kept with this log.",
    "The boy who minds the ropes turned fourteen and was allowed to sound the whistle.",
    "A crate was dropped on the quay and opened, but its contents were whole.",
)
FILLER = (
    "The office thanks all masters for their legible handwriting.",
    "Pages are numbered by the clerk.",
    "Nothing in this log may be erased, only struck out.",
    "Corrections are signed in the margin.",
)
TITLE = "Logbook of the Lantern Coast Ferry Company"
FIRST_DAY = date(1887, 3, 1)


@dataclass(frozen=True)
class Entry:
    """One day's voyage and its paragraph."""

    day: str
    boat: str
    captain: str
    start: str
    end: str
    passengers: int
    crates: int
    cargo: str
    text: str


@dataclass(frozen=True)
class Asked:
    """A question over the first n entries, and its answer."""

    question: str
    answer: str


def logbook(seed: int, count: int, terse: bool = False) -> list[Entry]:
    """`count` entries; a longer logbook of the same seed begins with a shorter one. Terse entries state facts alone."""
    draw = random.Random(f"logbook {seed}")
    return [_entry(draw, number, terse) for number in range(count)]


def _entry(draw: random.Random, number: int, terse: bool) -> Entry:
    when = FIRST_DAY + timedelta(days=number)
    day = f"{when.day} {MONTHS[when.month - 1]} {when.year}"
    boat, captain, cargo = draw.choice(BOATS), draw.choice(CAPTAINS), draw.choice(CARGOES)
    start, end = draw.sample(HARBOURS, 2)
    passengers, crates = draw.randint(3, 180), draw.randint(2, 95)
    sailing = (
        f"The {boat}, under Captain {captain}, sailed from {start} to {end} with {passengers} passengers "
        f"and {crates} crates of {cargo}."
    )
    passing = f" {draw.choice(WEATHER)} {draw.choice(EVENTS)}"  # drawn in any case: the facts stay the same
    text = f"{day}. {sailing}{'' if terse else passing}"
    return Entry(day, boat, captain, start, end, passengers, crates, cargo, text)


def document(entries: Sequence[Entry], filler: int = 0) -> str:
    """The text of a logbook; `filler` sentences of the clerk's, which state no facts, end it."""
    notes = " ".join(FILLER[place % len(FILLER)] for place in range(filler))
    return "\n\n".join([TITLE, *(entry.text for entry in entries), *([notes] if notes else [])])


def ask(entries: Sequence[Entry], seed: int) -> Asked:
    """A question that needs facts of several entries, of one of three kinds in turn."""
    draw = random.Random(f"question {seed}")
    return (_of_a_boat, _of_a_harbour, _of_two_boats)[seed % 3](entries, draw)


def _of_a_boat(entries: Sequence[Entry], draw: random.Random) -> Asked:
    boat = draw.choice(sorted({entry.boat for entry in entries}))
    own = [entry for entry in entries if entry.boat == boat]
    total, most = sum(entry.passengers for entry in own), max(own, key=lambda entry: entry.passengers)
    return Asked(
        f"How many passengers did the {boat} carry in all, and on which day did she carry the most?",
        f"{total} in all; the most, {most.passengers}, on {most.day}.",
    )


def _of_a_harbour(entries: Sequence[Entry], draw: random.Random) -> Asked:
    harbour = draw.choice(sorted({entry.end for entry in entries}))
    own = [entry for entry in entries if entry.end == harbour]
    return Asked(
        f"How many voyages ended at {harbour}, and how many crates of all cargoes together did they bring there?",
        f"{len(own)} voyages, {sum(entry.crates for entry in own)} crates.",
    )


def _of_two_boats(entries: Sequence[Entry], draw: random.Random) -> Asked:
    boats = sorted({entry.boat for entry in entries})
    if len(boats) < 2:
        return _of_a_boat(entries, draw)
    crates = {boat: sum(entry.crates for entry in entries if entry.boat == boat) for boat in draw.sample(boats, 2)}
    (one, first), (other, second) = crates.items()
    if first == second:
        answer = f"Neither: both carried {first} crates."
    else:
        answer = f"The {one if first > second else other}, by {abs(first - second)} crates ({first} and {second})."
    return Asked(f"Which carried more crates in all, the {one} or the {other}, and by how many?", answer)
