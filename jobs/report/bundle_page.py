"""A bundle's own report: the page without any document's text, put among its files, and the bundle sealed anew.

The bundle is made ready beside itself, with its files linked and not copied, and then takes its own place
(`export/bundle_places.py`), so that an export that is killed leaves a whole bundle. The page holds no time and no
place, so the same export gives the same version.
"""

from __future__ import annotations

from pathlib import Path

from relabel.export.bundle_cards import REPORT_NAME
from relabel.export.bundle_places import PART, beside, check_unchanged, linked_copy, locked, switch
from relabel.export.bundles import MANIFEST_NAME, Bundle, open_bundle, seal_bundle
from relabel.jobs.report.building import render_report
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.disk_errors import translate_errors


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
