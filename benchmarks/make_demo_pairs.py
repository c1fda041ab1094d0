"""Compose the demo's product searches: `jobs/demo/teach.jsonl` and `jobs/demo/shop.jsonl`.

    python benchmarks/make_demo_pairs.py

All words below were written by the project's authors. A seed draws queries and products from them, and a grade follows
from how a product was drawn: 2 is what was asked for with every attribute asked for, 1 is one with a single attribute
off or a close relative, 0 is something else. Half of the queries ask for a product and half for an accessory of one,
and what one asks for is grade 0 for the other: so a product's own words do not say its grade, and neither do words that
it shares with the query.

The two files share the words for attributes that queries use and the sentences of bodies. Kinds of product, their
relatives, brands and the other words for an attribute are in one of them alone.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "jobs/demo"
DOCS_PER_QUERY = 8
LITERAL = {"teach": 0.7, "shop": 0.5}
"""How often a product has the query's own word for an attribute."""
TEACH_QUERIES = 300
TEACH_SEED = 11
SHOP_QUERIES = 160
SHOP_SEED = 12


Graded = tuple[int, tuple[str, str]]
"""A grade with the title and the body of a document."""


@dataclass(frozen=True)
class Attribute:
    """Args:
    value: what queries say.
    teach, shop: other words for it, by file.
    """

    value: str
    teach: tuple[str, ...]
    shop: tuple[str, ...]

    def words(self, side: str) -> tuple[str, ...]:
        return self.teach if side == "teach" else self.shop


@dataclass(frozen=True)
class Kind:
    """A kind of product.

    Args:
        names: what queries say, then other names for it.
        near: close relatives.
        parts: accessories, `{}` for the name.
        materials: that it is made of.
        is_worn: it is for women, men or children.
    """

    names: tuple[str, ...]
    near: tuple[str, ...]
    parts: tuple[str, ...]
    materials: tuple[str, ...]
    is_worn: bool


def attributes(table: str) -> dict[str, Attribute]:
    """One a line: value | words of teach | words of shop."""
    found = {}
    for line in table.strip().splitlines():
        value, teach, shop = (part.strip() for part in line.split("|"))
        found[value] = Attribute(value, tuple(teach.split(", ")), tuple(shop.split(", ")))
    return found


def kinds(table: str, materials: str, *, is_worn: bool = False) -> list[Kind]:
    """One a line: names | near | accessories."""
    found = []
    for line in table.strip().splitlines():
        names, near, parts = (tuple(part.strip().split(", ")) for part in line.split("|"))
        found.append(Kind(names, near, parts, tuple(materials.split()), is_worn))
    return found


COLOURS = attributes("""
red    | crimson, ruby, cherry    | scarlet, vermilion
blue   | navy, cobalt, azure      | sapphire, indigo
green  | olive, emerald, mint     | sage, jade
black  | jet, ebony               | onyx, raven
white  | ivory, snow              | pearl, chalk
brown  | chestnut, tan, cocoa     | chocolate, mocha
pink   | rose, blush              | fuchsia, salmon
yellow | mustard, lemon           | canary, sunflower
purple | lilac, plum              | violet, lavender
grey   | slate, ash               | charcoal, graphite
orange | tangerine, pumpkin       | apricot, amber
""")
MATERIALS = attributes("""
leather | cowhide, nappa              | full-grain hide, calfskin
cotton  | poplin, cotton jersey       | percale, brushed cotton
wool    | merino, lambswool           | shetland, virgin wool
linen   | flax                        | washed flax
silk    | mulberry silk, charmeuse    | silk satin
wood    | oak, beech                  | walnut, acacia
steel   | stainless, brushed steel    | inox, powder-coated steel
plastic | polypropylene, acrylic      | polycarbonate, ABS
glass   | borosilicate, crystal       | tempered glass
ceramic | porcelain, stoneware        | earthenware, bone china
bamboo  | moso bamboo                 | pressed bamboo
""")
PEOPLE = attributes("""
women | ladies, her          | woman, female
men   | gents, him           | man, male
kids  | children, toddlers   | juniors, boys and girls
""")

TEACH_KINDS = [
    *kinds(
        """
        jacket, coat | gilet, hoodie | hanger for {}, garment bag for {}, replacement zip for {}
        gloves | mittens, arm warmers | glove stretcher for {}, drying rack for {}, clip set for {}
        sneakers, trainers | sandals, loafers | spare laces for {}, cleaning kit for {}, insoles for {}
        belt | suspenders, sash | hole punch for {}, belt hanger, replacement buckle for {}
        scarf, shawl | neck gaiter, bandana | scarf ring, storage box for {}, moth balls for {}
        trousers, pants | shorts, leggings | trouser hanger, patch kit for {}, stain remover for {}
        dress, gown | skirt, jumpsuit | dress form, sewing pattern for a {}, cover for a {}
        backpack, rucksack | duffel bag, tote bag | rain cover for {}, replacement strap for {}, patch for {}
        slippers, house shoes | flip-flops, clogs | felt soles for {}, rack for {}, deodorizer for {}
        cap | beanie, sun visor | cap washer cage, wall rack for {}, sweatband insert for {}
        """,
        "leather cotton wool linen silk",
        is_worn=True,
    ),
    *kinds(
        """
        cushion, throw pillow | bolster, seat pad | cover for {}, cushion filling, insert for {}
        blanket, throw | quilt, bedspread | storage bag for {}, blanket ladder, shaver for {}
        curtains, drapes | roller blind, shutters | rail for {}, tieback for {}, hooks for {}
        tablecloth, table linen | placemat, table runner | clips for {}, weights for {}, stain spray for {}
        rug, carpet | doormat, bath mat | underlay for {}, gripper tape for {}, shampoo for {}
        towel | bathrobe, face cloth | rail for {}, hook for {}, warmer for {}
        """,
        "cotton wool linen silk",
    ),
    *kinds(
        """
        sofa, couch | armchair, daybed | slipcover for {}, replacement legs for {}, arm tray for {}
        bookcase, bookshelf | sideboard, magazine rack | bookends, wall anchor for {}, LED strip for {}
        desk, writing table | console table, workbench | desk pad, cable tray for {}, drawer insert for {}
        stool, bar seat | bench, ottoman | cover for {}, rubber feet for {}, footrest for {}
        wardrobe, armoire | chest of drawers, clothes rail | door handle for {}, hinge for {}, light for {}
        bed frame, bedstead | mattress, headboard | slats for {}, screws for {}, risers for {}
        mirror, looking glass | picture frame, wall art | mounting tape for {}, mirror cleaner, lamp for {}
        lampshade, lamp shade | ceiling light, lantern | bulb for {}, adapter ring for {}, wire frame for {}
        """,
        "wood steel plastic glass bamboo leather",
    ),
    *kinds(
        """
        teapot | coffee pot, kettle | tea cosy for {}, strainer for {}, spare lid for {}
        mug, cup | tumbler, goblet | rack for {}, lid for {}, warmer plate for {}
        frying pan, skillet | saucepan, wok | splatter guard for {}, lid for {}, scraper for {}
        salad bowl, serving bowl | platter, tray | servers for {}, cover for {}, stand for {}
        chopping board, cutting board | knife block, bread bin | stand for {}, oil for {}, feet for {}
        storage jar, canister | lunch box, bottle | labels for {}, seal for {}, scoop for {}
        vase, flower vase | planter, candle holder | brush for {}, pebbles for {}, artificial stems for {}
        bin, trash can | laundry basket, crate | liners for {}, pedal for {}, deodorant for {}
        soap dispenser, pump bottle | soap dish, toothbrush holder | refill for {}, spare pump for {}, label for {}
        """,
        "steel plastic glass ceramic wood bamboo",
    ),
]
SHOP_KINDS = [
    *kinds(
        """
        sweater, jumper, pullover | cardigan, vest | fabric comb for {}, wash bag for {}, shoulder pads for {}
        wallet, billfold | coin purse, card holder | chain for {}, RFID insert for {}, balm for {}
        boots | galoshes, shoes | boot jack, waterproof spray for {}, tree for {}
        pyjamas, sleepwear | nightgown, onesie | folding board for {}, elastic for {}, drawer sachet for {}
        shirt, blouse | T-shirt, tunic | collar stays for {}, ironing spray for {}, buttons for {}
        handbag, purse | clutch, satchel | organiser for {}, bag hook, replacement handle for {}
        socks | tights, leg warmers | sock sorter, darning kit for {}, drying ring for {}
        """,
        "leather cotton wool linen silk",
        is_worn=True,
    ),
    *kinds(
        """
        duvet cover, quilt cover | fitted sheet, pillowcase | corner clips for {}, buttons for {}, box for {}
        apron, kitchen pinafore | oven glove, tea towel | apron hook, pattern for {}, neck clip for {}
        hammock, hanging bed | swing seat, deck chair | stand for {}, ropes for {}, carabiner for {}
        """,
        "cotton wool linen silk",
    ),
    *kinds(
        """
        coffee table, cocktail table | nightstand, dining table | corner guards for {}, castors for {}, polish for {}
        rocking chair, rocker | recliner, folding chair | runners for {}, head cushion for {}, felt pads for {}
        shoe rack, shoe shelf | coat stand, umbrella stand | drip tray for {}, spare rail for {}, hooks for {}
        cot, baby crib | cradle, toddler bed | bumper for {}, mobile for {}, teething rail for {}
        wall clock | alarm clock, wristwatch | battery for {}, hanger for {}, spare hands for {}
        """,
        "wood steel plastic glass bamboo leather",
    ),
    *kinds(
        """
        dinner plate | side plate, soup bowl | plate hanger, divider pads for {}, warmer for {}
        butter dish | cheese dome, sugar bowl | butter knife, spare lid for {}, shelf for {}
        casserole, Dutch oven | stockpot, roasting tin | trivet for {}, spare knob for {}, carrier for {}
        watering can | garden hose, spray bottle | rose head for {}, hook for {}, brush for {}
        pitcher, jug | carafe, thermos | lid for {}, stirrer for {}, drying stand for {}
        """,
        "steel plastic glass ceramic wood bamboo",
    ),
]
BRANDS = {
    "teach": "Arvelo Brindle Corvane Dunmere Eskola Farrow&Pell Glenholt Hestia9 Ivarsen Jorvik Kestrin Lunary",
    "shop": "Maddox&Fen Norrvik Oakhurst Pellina Quillon Rosmarin Silverthwaite Tarn&Co Umbrio Velmora",
}
QUERIES = (
    "{attributes} {name}",
    "{attributes} {name}{people}",
    "{name} {attributes}{people}",
    "{name}{people} in {attributes}",
    "looking for a {attributes} {name}{people}",
    "{attributes} {name}{people} gift",
    "best {attributes} {name}{people}",
)
PART_QUERIES = ("{part}", "looking for a {part}", "best {part}", "{part} gift")
TITLES = (
    "{brand} {colour} {material} {name}{people}",
    "{brand} {name}{people}, {material}, {colour}",
    "{name}{people} in {colour} {material} by {brand}",
    "{material} {name}{people} - {colour} | {brand}",
    "{colour} {name}{people} made of {material}",
)
SHORT_TITLES = ("{brand} {name}{people}", "{name}{people} by {brand}", "The {brand} {name}{people}")
SHORT_BODIES = ("In {colour}, made of {material}.", "{material}, {colour}.", "Comes in {colour} {material}.")
PART_TITLES = (
    "{part}, suits {colour} {material} models",
    "{brand} {part}: for {colour} and {material} ones",
    "{part} ({colour}, {material})",
    "{brand} {part} to match your {colour} {material} {name}",
)
BODIES = (
    "",
    "",
    "",
    "Free returns.",
    "Our best seller.",
    "Checked by hand.",
    "Easy to clean.",
    "Ships in two days.",
    "Built to last.",
)


class Composer:
    """Draws the queries of a file with their documents.

    Args:
        side: `teach` or `shop`.
    """

    def __init__(self, side: str, kinds: Sequence[Kind], seed: int) -> None:
        self.side = side
        self.kinds = kinds
        self.random = random.Random(seed)
        self.texts: set[str] = set()

    def query(self, number: int) -> list[dict[str, Any]]:
        """The pairs of one query."""
        kind = self.kinds[number % len(self.kinds)]
        text, documents = self.search(kind)
        while text in self.texts:
            text, documents = self.search(kind)
        self.texts.add(text)
        self.random.shuffle(documents)
        query_id = f"{self.side}-{number + 1:03d}"
        return [
            {
                "query_id": query_id,
                "query": text,
                "doc_id": f"{query_id}-d{place}",
                "title": title,
                "body": body,
                "grade": grade,
            }
            for place, (grade, (title, body)) in enumerate(documents, 1)
        ]

    def search(self, kind: Kind) -> tuple[str, list[Graded]]:
        """A query's text, and its documents with their grades."""
        if self.random.random() < 0.5:
            return self.search_for_product(kind)
        return self.search_for_part(kind)

    def search_for_product(self, kind: Kind) -> tuple[str, list[Graded]]:
        draw = self.random
        wanted = self.draw_attributes(kind)
        asked = draw.sample(["colour", "material"], draw.choice((1, 1, 2)))
        if kind.is_worn and draw.random() < 0.5:
            asked.append("people")
        documents = [(2, self.product(kind, wanted, asked)) for _ in range(draw.choice((2, 3)))]
        documents += [(1, self.off_by_one(kind, wanted, asked)) for _ in range(2)]
        if draw.random() < 0.6:
            documents.append((1, self.relative(kind, wanted)))
        documents.append((0, self.other(kind, wanted)))
        if draw.random() < 0.5:
            documents.append((0, self.unrelated(kind)))
        while len(documents) < DOCS_PER_QUERY:
            documents.append((0, self.part(kind, draw.choice(kind.parts), wanted)))
        return self.query_text(kind.names[0], wanted, asked), documents

    def search_for_part(self, kind: Kind) -> tuple[str, list[Graded]]:
        draw = self.random
        wanted = self.draw_attributes(kind)
        asked = draw.sample(["colour", "material"], draw.choice((1, 1, 2)))
        part = draw.choice(kind.parts)
        documents = [(2, self.part(kind, part, self.redrawn(kind, wanted, asked))) for _ in range(draw.choice((2, 3)))]
        for _ in range(2):
            values = self.redrawn(kind, self.with_one_off(kind, wanted, asked), asked)
            documents.append((1, self.part(kind, part, values)))
        documents += [(0, self.product(kind, wanted, asked)) for _ in range(draw.choice((1, 2)))]
        documents.append((0, self.other(kind, wanted)))
        others = [one for one in kind.parts if one != part]
        while len(documents) < DOCS_PER_QUERY:
            documents.append((0, self.part(kind, draw.choice(others), wanted)))
        described = " ".join(wanted[one] for one in ("colour", "material") if one in asked)
        text = draw.choice(PART_QUERIES).format(part=part_of(part, f"{described} {kind.names[0]}"))
        return self.perhaps_misspelt(text), documents

    def draw_attributes(self, kind: Kind) -> dict[str, str]:
        drawn = {"colour": self.random.choice(list(COLOURS)), "material": self.random.choice(kind.materials)}
        if kind.is_worn:
            drawn["people"] = self.random.choice(list(PEOPLE))
        return drawn

    def query_text(self, name: str, wanted: dict[str, str], asked: Sequence[str]) -> str:
        described = " ".join(wanted[one] for one in ("colour", "material") if one in asked)
        people = f" for {wanted['people']}" if "people" in asked else ""
        text = self.random.choice(QUERIES).format(name=name, attributes=described, people=people)
        if people and people not in text:
            text += people
        return self.perhaps_misspelt(text)

    def perhaps_misspelt(self, text: str) -> str:
        """One in ten has two neighbouring letters in the other order."""
        if self.random.random() >= 0.1:
            return text
        place = self.random.randrange(1, len(text) - 2)
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]

    def word(self, attribute: Attribute) -> str:
        """The query's word for an attribute, or another one."""
        if self.random.random() < LITERAL[self.side]:
            return attribute.value
        return self.random.choice(attribute.words(self.side))

    def worded(self, values: dict[str, str]) -> dict[str, str]:
        words = {"brand": self.random.choice(BRANDS[self.side].split()), "people": ""}
        for name, table in (("colour", COLOURS), ("material", MATERIALS), ("people", PEOPLE)):
            if name in values:
                words[name] = self.word(table[values[name]])
        if words["people"]:
            words["people"] = f" for {words['people']}"
        return words

    def redrawn(self, kind: Kind, wanted: dict[str, str], asked: Sequence[str]) -> dict[str, str]:
        """The attributes asked for; the others are drawn again."""
        return {**self.draw_attributes(kind), **{one: wanted[one] for one in asked}}

    def product(self, kind: Kind, wanted: dict[str, str], asked: Sequence[str]) -> tuple[str, str]:
        """A product with the attributes asked for."""
        return self.described(self.random.choice(kind.names), self.redrawn(kind, wanted, asked))

    def described(self, name: str, values: dict[str, str]) -> tuple[str, str]:
        """Title and body of a product; attributes are in the one or in the other."""
        words = {**self.worded(values), "name": name}
        body = self.random.choice(BODIES)
        if self.random.random() < 0.7:
            title = self.random.choice(TITLES)
        else:
            title = self.random.choice(SHORT_TITLES)
            body = f"{capital(self.random.choice(SHORT_BODIES).format(**words))} {body}".strip()
        return capital(title.format(**words)), body

    def with_one_off(self, kind: Kind, wanted: dict[str, str], asked: Sequence[str]) -> dict[str, str]:
        """What is wanted, with one of the attributes asked for off."""
        name = self.random.choice(list(asked))
        tables = {"colour": list(COLOURS), "material": list(kind.materials), "people": list(PEOPLE)}
        other = self.random.choice([value for value in tables[name] if value != wanted[name]])
        return {**wanted, name: other}

    def off_by_one(self, kind: Kind, wanted: dict[str, str], asked: Sequence[str]) -> tuple[str, str]:
        """The kind of product asked for, with one of the attributes asked for off."""
        return self.product(kind, self.with_one_off(kind, wanted, asked), asked)

    def relative(self, kind: Kind, wanted: dict[str, str]) -> tuple[str, str]:
        return self.described(self.random.choice(kind.near), wanted)

    def other(self, kind: Kind, wanted: dict[str, str]) -> tuple[str, str]:
        """A product of another kind, with the same attributes where it has them."""
        others = [one for one in self.kinds if one is not kind and wanted["material"] in one.materials]
        drawn = self.random.choice(others)
        values = {**self.draw_attributes(drawn), "colour": wanted["colour"], "material": wanted["material"]}
        return self.described(self.random.choice(drawn.names), values)

    def unrelated(self, kind: Kind) -> tuple[str, str]:
        """A product of another kind, with attributes of its own."""
        drawn = self.random.choice([one for one in self.kinds if one is not kind])
        return self.described(self.random.choice(drawn.names), self.draw_attributes(drawn))

    def part(self, kind: Kind, part: str, values: dict[str, str]) -> tuple[str, str]:
        """An accessory."""
        name = self.random.choice(kind.names)
        words = {**self.worded(values), "name": name, "part": part.format(name)}
        title = self.random.choice(PART_TITLES).format(**words)
        return capital(title), self.random.choice(BODIES)


def part_of(part: str, product: str) -> str:
    """An accessory of a product, as a query has it."""
    return part.format(product) if "{}" in part else f"{part} for {product}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def composed(side: str, kinds: Sequence[Kind], num_queries: int, seed: int) -> list[dict[str, Any]]:
    composer = Composer(side, kinds, seed)
    return [pair for number in range(num_queries) for pair in composer.query(number)]


def write(name: str, pairs: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    (FOLDER / name).write_text(text, encoding="utf-8")


def main() -> None:
    write("teach.jsonl", composed("teach", TEACH_KINDS, TEACH_QUERIES, TEACH_SEED))
    write("shop.jsonl", composed("shop", SHOP_KINDS, SHOP_QUERIES, SHOP_SEED))


if __name__ == "__main__":
    main()
