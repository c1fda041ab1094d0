"""Every model that a spec is made of, those of labelers and engines too: what sweeps over keys are generated from."""

from collections.abc import Iterator

from relabel.distill.students.spec import DistillSpec
from relabel.distill.teachers.spec import METHODS
from relabel.export.specs import BenchSpec, ExportSpec
from relabel.jobs.rerankers import RerankerArgs
from relabel.jobs.score import BundleArgs, StudentArgs
from relabel.labelers.registry import engine_class, engine_names, labeler_class, labeler_names
from relabel.manifests.specs import JobSpec, Spec

ROOTS = (
    JobSpec,
    DistillSpec,
    *(method.spec for method in METHODS.values()),
    ExportSpec,
    BenchSpec,
    StudentArgs,
    BundleArgs,
    RerankerArgs,
)


def spec_models() -> list[type[Spec]]:
    """By module and name."""
    loaded = [
        *ROOTS,
        *(labeler_class(name).Options for name in labeler_names()),
        *(engine_class(name).Args for name in engine_names()),
    ]
    assert loaded

    def below(model: type[Spec]) -> Iterator[type[Spec]]:
        yield model
        for inner in model.__subclasses__():
            yield from below(inner)

    found = {model for model in below(Spec) if model is not Spec and model.__module__.startswith("relabel.")}
    return sorted(found, key=lambda model: (model.__module__, model.__qualname__))
