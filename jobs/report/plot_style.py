"""The SVG that matplotlib draws, without sizes and colours of its own: the page's style sheet says them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from markupsafe import Markup

from relabel.manifests.digests import sha256_bytes

INK, GRID = "#010101", "#020202"
SERIES = ("#110000", "#110011", "#110022", "#110033", "#110044", "#110055")
_CLASSES = {INK: "ink", GRID: "grid", **{colour: f"s{number}" for number, colour in enumerate(SERIES, start=1)}}
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"


def fitted(data: bytes) -> Markup:
    """An SVG file's drawing as it may be inside a page: no styles, no metadata, no ids but those it refers to,
    colours as classes.
    """
    ElementTree.register_namespace("", _SVG)
    own = f"{sha256_bytes(data)[:8]}-"
    data = re.sub(rb'((?:url\(|href=")#|\bid=")', lambda match: match[0] + own.encode(), data)
    root = ElementTree.fromstring(data)
    names = {name.decode() for pair in re.findall(rb'url\(#([^)]+)\)|href="#([^"]+)"', data) for name in pair}
    for element in list(root.iter()):
        for child in list(element):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                element.remove(child)
        _restyle(element)
        if element.attrib.get("id") not in names:
            element.attrib.pop("id", None)
        if _LINK in element.attrib:
            element.set("href", element.attrib.pop(_LINK))
    box = root.attrib["viewBox"]
    for name in list(root.attrib):
        del root.attrib[name]
    root.attrib.update({"viewBox": box, "class": "plot", "aria-hidden": "true", "focusable": "false"})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _restyle(element: ElementTree.Element) -> None:
    classes = []
    for name, value in _properties(element):
        role = _CLASSES.get(value)
        if role is not None and name in ("fill", "stroke"):
            classes.append(f"{name[0]}-{role}")
        elif name == "font-size":
            element.set(name, value.removesuffix("px"))
        elif not name.startswith("font"):
            element.set(name, value)
    if classes:
        element.set("class", " ".join(classes))


def _properties(element: ElementTree.Element) -> list[tuple[str, str]]:
    held: list[tuple[str, str]] = [
        (name, element.attrib[name]) for name in ("fill", "stroke") if name in element.attrib
    ]
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = declaration.partition(":")
        if value:
            held.append((name.strip(), value.strip()))
    return held
