"""A bundle in MLServer: token ids in, the probabilities of its heads out."""

import importlib.util
import sys
from pathlib import Path

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Bundle(MLModel):
    async def load(self):
        folder = Path(self.settings.parameters.uri).resolve()  # once: every file comes from one version
        spec = importlib.util.spec_from_file_location("load", folder / "load.py")
        load = sys.modules["load"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(load)
        self.student = load.Student(folder)
        return True

    async def predict(self, payload):
        feed = {one.name: NumpyCodec.decode_input(one) for one in payload.inputs}
        heads = list(self.student.heads)
        outputs = [
            NumpyCodec.encode_output(head, probs)
            for head, probs in zip(heads, self.student.session.run(heads, feed), strict=True)
        ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
