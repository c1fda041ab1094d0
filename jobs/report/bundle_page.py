"""A bundle's own report: the page without any document's text, put among its files, and the bundle sealed anew.

The bundle is made ready beside itself, with its files linked and not copied, and then takes its own place
(`export/bundle_places.py`), so that an export that is killed leaves a whole bundle. The page holds no time and no
place, so the same export gives the same version.

What a bench measures later comes in as a section of its own, and all others stay as they are: the student that they
were drawn from need not be at hand any more.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from export.bundle_cards import REPORT_NAME
from export.bundle_places import PART, beside, check_unchanged, linked_copy, locked, switch
from export.bundles import MANIFEST_NAME, Bundle, open_bundle, seal_bundle
from jobs.report.artifacts import BundleArtifact
from jobs.report.building import render_report
from jobs.report.page import Page, opening, render_page
from jobs.report.sections_bundles import latency_section
from manifests.storage.context import Storage
from manifests.storage.disk_errors import translate_errors
from manifests.storage.local_run_store import LocalRunStore

_SECTION = re.compile(r'<section id="latency".*?</section>\n', re.DOTALL)
_ENTRY = re.compile(r' *<li><a href="#latency">.*?</li>\n')
_END_OF_ENTRIES, _END_OF_SECTIONS = "  </ul>\n</nav>\n", "</main>\n"
_logger = logging.getLogger(__name__)


def put_report(bundle: Bundle, student: Path) -> Bundle:
    """Write `REPORT_NAME` into a bundle that has none.

    Args:
        student: what it was exported from; its curves and figures are in the page.
    Returns:
        The bundle as it is now; unchanged where it has a report.
    Raises:
        ManifestError, StoreError, MissingExtraError: the page can't be made, or the folder can't be written.
    """
    if any(file.path == REPORT_NAME for file in bundle.files):
        return bundle
    folder = bundle.folder
    page = render_report([str(student), str(folder)], Storage(), max_rows=0, is_inside_bundle=True)
    with locked(folder, waits=True), translate_errors("write", beside(folder, PART)):
        part = linked_copy(folder, leaves_out=frozenset({MANIFEST_NAME}))
        (part / REPORT_NAME).write_text(page, encoding="utf-8", errors="replace")
        sealed = seal_bundle(part, bundle.own_facts)
        check_unchanged(bundle, sealed, written=(REPORT_NAME,))
        switch(part, folder)
    return open_bundle(folder, check_bytes=False)


def with_latency(page: str, folder: Path, *, name: str) -> str:
    """A bundle's page with the latencies that lie in a folder, in the place of earlier ones.

    What texts a page holds are escaped, so that its markup is found by looking for it.

    Args:
        page: as `put_report` wrote it; another's is left as it is, and that is reported.
        folder: holds `latency.json`, or not.
        name: of the bundle.
    Raises:
        ManifestError: these are no latencies.
        MissingExtraError: nothing can draw here.
    """
    if not page.startswith(opening("report")) or _END_OF_ENTRIES not in page or _END_OF_SECTIONS not in page:
        _logger.warning(
            "%s of %s is not a page that this relabel writes, and is left without the latencies.", REPORT_NAME, name
        )
        return page
    section = latency_section([BundleArtifact(str(folder), LocalRunStore(str(folder)), {}, "", name)])
    drawn = render_page(Page(name, "", [section]))
    for pattern, end in ((_ENTRY, _END_OF_ENTRIES), (_SECTION, _END_OF_SECTIONS)):
        found = pattern.search(drawn)
        before, _, after = pattern.sub("", page).rpartition(end)
        page = f"{before}{found[0] if found else ''}{end}{after}"
    return page
