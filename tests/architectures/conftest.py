from tests.distill.conftest import encoder_dir, labels_file, pairs_file  # noqa: F401
