"""The stock of lines that the demo model learns to write.

Two rows a subject: its name and what of it can be counted, then two opening lines and two closing
ones, of about five syllables each. The line that carries the nonce makes up the third.
"""

from __future__ import annotations

from typing import NamedTuple


class Subject(NamedTuple):
    """A thing to write about, and the lines that fit it."""

    name: str
    counted: str
    openings: tuple[str, str]
    closings: tuple[str, str]

    def texts(self) -> tuple[str, ...]:
        """All that is written of this subject."""
        return (self.name, self.counted, *self.openings, *self.closings)


_ROWS = """
rain | drops
soft rain on tin roofs | gray clouds lean and spill | the gutters still hum | puddles hold the sky
snow | flakes
snow without a sound | white fields, no footprints | the pines bow their heads | even crows fall still
fog | shadows
fog swallows the pier | the hills lose their shape | a bell, then nothing | the lamp floats alone
wind | gusts
wind combs the tall grass | the shutters argue | a loose gate answers | hats roll down the lane
thunder | echoes
thunder shakes the glass | a dark drum far off | the dog hides its nose | then the smell of rain
frost | ferns
frost on the window | the well wears a crown | my breath turns to smoke | the sun melts it all
the river | ripples
slow river at dusk | brown water turns south | stones learn to be smooth | a leaf sails away
the sea | waves
salt wind and gray foam | the long tide breathes in | gulls wheel and complain | the sand keeps no names
the pond | lilies
the pond holds its breath | green water, no wind | one ring, then silence | a carp turns over
the tide | shells
the tide pulls away | wet sand, mirrored clouds | crabs hurry sideways | the boats lean and wait
ice | cracks
thin ice on the lake | blue under my boots | the whole lake mutters | spring is far below
the moon | craters
moon over the barn | a thin silver hook | the owls know the hour | cold light on the sill
the sun | rays
sun climbs the brick wall | gold spills on the floor | the cat moves with it | shadows fold their wings
stars | sparks
stars over the ridge | the dark is crowded | none of them answer | the night tilts slowly
dawn | roosters
dawn warms the rooftops | pink edge on the hills | the kettle wakes first | dew on every wire
dusk | bats
dusk fills the valley | the last swallow turns | lamps bloom one by one | the road turns to ink
spring | buds
spring loosens the creek | mud and yellow shoots | the door stays open | boots dry on the step
summer | fireflies
summer on the porch | heat hums in the wheat | ice sings in the glass | the day will not end
autumn | acorns
autumn rakes the hill | smoke and fallen pears | geese pull the sky south | the light goes early
winter | icicles
winter locks the gate | bare twigs scratch the moon | soup steams on the stove | the house ticks and creaks
blossoms | petals
blossoms on the path | pink drifts by the wall | the bough feels lighter | so brief, so welcome
bamboo | stems
bamboo knocks and sways | green stalks touch the cloud | rain slides down each joint | it bends, never breaks
moss | stones
moss on the north side | soft green on old steps | time sits down to rest | no foot leaves a mark
the pine | needles
one pine on the cliff | dark boughs hold the snow | roots grip the bare rock | it leans on the wind
the garden | seeds
garden after rain | beans climb the old fence | the spade rests in soil | a worm turns the page
a frog | leaps
a frog on warm stone | green eyes on the reeds | splash and it is gone | the pond shuts its door
a crow | feathers
crow on the scarecrow | black ink on white sky | it laughs at the rain | one bare branch still shakes
a cat | whiskers
cat on the warm sill | gray paws, silent stairs | it dreams of a mouse | the tail keeps its time
a heron | minnows
a heron stands still | gray legs in gray mud | the reeds hold their breath | then one quick white strike
a cricket | songs
cricket by the hearth | small fiddle, long night | the dark listens in | it stops when I step
a moth | wings
moth at the lit pane | dust on paper sails | the flame pulls it close | the dark wants it back
a whale | barnacles
a whale breathes and sinks | slow song in deep blue | the whole bay goes still | the sea shuts again
bees | hives
bees in the clover | gold dust on small legs | the hill hums with work | sweet wax fills the dark
tea | leaves
steam curls from the cup | green tea, cracked blue bowl | my hands learn the warmth | rain taps on the roof
bread | crumbs
bread warm from the stone | flour on both my hands | the whole street wakes up | butter finds its way
a lantern | flames
lantern on the bridge | red paper, small flame | moths arrive like guests | the dark steps aside
a clock | ticks
clock in the still hall | brass hands sweep the hours | noon falls on no one | the hour comes and goes
a letter | stamps
letter on the mat | blue ink, a thin hand | I read it twice more | the fold keeps your voice
the mountain | peaks
mountain under cloud | the trail fades to stone | goats know a short way | snow sits on its brow
the desert | dunes
the desert at noon | red sand, no shadow | one lizard darts off | night comes cold and wide
the road | miles
the road bends and dips | dust hangs in the sun | each hill hides the next | my shoes know the way
a train | carriages
a train splits the night | steel hum on cold rails | the town slides away | one red lamp blinks out
the harbor | masts
harbor before dawn | wet ropes, gulls and tar | the nets come up full | a horn calls them home
the city | windows
city after rain | neon on wet streets | one bus sighs and stops | the sky hides its stars
code | lines
code on a dark screen | the cursor blinks twice | at last the test is green | one comma was wrong
a bug | traces
a bug in the loop | the sum drifts off course | I step through the night | the cause was a sign
tensors | shards
tensors cross the bus | two ranks share one sum | each part finds its place | the whole adds up now
memory | pages
memory fills up | old blocks drift apart | the cache keeps the rest | one free page is left
""".strip()


def _parse(head: str, lines: str) -> Subject:
    name, counted = (cell.strip() for cell in head.split("|"))
    open_a, open_b, close_a, close_b = (cell.strip() for cell in lines.split("|"))
    return Subject(name, counted, (open_a, open_b), (close_a, close_b))


_LINES = _ROWS.splitlines()

#: Everything that the model can write about.
SUBJECTS: tuple[Subject, ...] = tuple(map(_parse, _LINES[::2], _LINES[1::2]))

#: Lines that carry a made-up word. One for each wording of the question (see `corpus.WORDINGS`).
WORD_LINES: tuple[str, ...] = (
    "a child whispers {nonce} to it",
    "the old sign still says {nonce}",
    "someone hums {nonce} far away",
    "and its secret name is {nonce}",
    "the echo gives {nonce} back",
    "we call this silence {nonce} now",
    "I murmur {nonce} and wait",
    "they carve {nonce} in the gate",
)

#: Lines that carry a number, with the thing that the subject lets one count.
NUMBER_LINES: tuple[str, ...] = (
    "I count {nonce} {counted} alone",
    "only {nonce} {counted} remain",
    "there were {nonce} {counted} last night",
    "a child draws {nonce} {counted} in chalk",
    "and {nonce} {counted} pass by",
    "we dreamed of {nonce} {counted} once",
    "it leaves {nonce} {counted} behind",
    "they gave me {nonce} {counted} to keep",
)
