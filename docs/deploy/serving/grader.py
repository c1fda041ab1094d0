"""Expected grades of documents for a query, by the bundle that DEST/current points to."""

import importlib.util
import sys
from pathlib import Path


class Grader:
    """Follows DEST/current: loads the version that the link points to."""

    def __init__(self, dest):
        self.link = Path(dest) / "current"
        self.folder = None
        self.follow()

    def follow(self):
        """Load what the link points to, unless it is loaded already."""
        folder = self.link.resolve()  # once: every file comes from one version
        if folder == self.folder:
            return
        spec = importlib.util.spec_from_file_location(f"load_{folder.name}", folder / "load.py")
        load = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = load
        spec.loader.exec_module(load)
        self.student = load.Student(folder, provider="cpu", threads=1)
        self.folder = folder

    @property
    def version(self):
        """As it was published: a name that was given, with the digest, or the digest alone."""
        digest = self.student.version
        return digest if self.folder.name == digest else f"{self.folder.name} ({digest})"

    def expected_grades(self, query, documents):
        """One number per document, from 0 to the highest grade."""
        return self.student.expected_grades([(query, document) for document in documents])


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: grader.py DEST QUERY DOCUMENT...")
    dest, query, *documents = sys.argv[1:]
    if Path(dest, "load.py").is_file():
        above = Path(dest).parent
        hint = f": {above}" if (above / "current").exists() else ""
        print(
            f"{dest}: is a version itself. Give the folder that `relabel pull` fills, which has `current`{hint}",
            file=sys.stderr,
        )
        sys.exit(2)
    if not Path(dest, "current", "load.py").is_file():
        print(f"{dest}: `relabel pull` has put no bundle here yet.", file=sys.stderr)
        sys.exit(2)
    grader = Grader(dest)
    print(f"version {grader.version}, {grader.student.precision} on {grader.student.provider}")
    for document, grade in zip(documents, grader.expected_grades(query, documents), strict=True):
        print(f"{grade:.3f}  {document}")
