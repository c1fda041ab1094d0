"""One self-contained HTML page about label runs, trainings, teachers, students and bundles. Never computes a figure of
quality itself (`manifests/metrics` does), and writes nothing into what it reports on, except a new bundle's own page.
Read `build.py` first.
"""
