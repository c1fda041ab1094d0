"""Report: one self-contained HTML page about label runs, students and bundles. Owns how a page looks; never computes a
figure of quality itself (`manifests/` does) and never writes into what it reports on (`bundle_page.py` puts a page into
a new bundle). Read `page.py` first, then `building.py`, whose `render_report(paths)` gives the HTML.

The page kit, for any command that wants a page of its own:

    from relabel.jobs.report.page import csv_download
    from relabel.jobs.report.page import Badge, Drawing, Facts, Fold, Paragraph, Section, Shade, Side, Table
    from relabel.jobs.report.page import confusion_table
    from relabel.jobs.report.page import Page, render_page
    from relabel.jobs.report.plots import Bars, draw_bars, draw_lines

    head, rows = ("query", "flips"), [("red shoe", 3)]
    table = Table(head, rows, caption="Queries that moved", download=csv_download("moved", head, rows))
    svg = draw_bars([Bars("teacher", ["0", "1", "2"], [12, 30, 4])], label="grade", value="rows")
    figure = Drawing("Grades", svg, alt="Grade 0: 12 rows, grade 1: 30, grade 2: 4.")
    flips = Section("flips", "Flips", [Paragraph("…"), Side([figure]), table])
    html = render_page(Page("A beside B", "two label runs", [flips]))

- Everything that is given is text: it is escaped wherever it is shown. Nothing takes markup but `Drawing.svg`, which
  `plots.py` and `lineage.py` make.
- A section without blocks is left out, so that a caller need not ask twice whether there is something to say.
- `Page.browser` takes `browser.BrowserData`, the labels browser, or None.
- The same blocks give the same bytes: a page holds no time and nothing random, so that a sealed bundle may hold one.
"""
