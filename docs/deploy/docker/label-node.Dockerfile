# A machine that labels: docker run --gpus all -v /srv/relabel:/srv/relabel IMAGE run /srv/relabel/jobs/ecom.yaml --shard 0/1
FROM python:3.12-slim
ARG EXTRAS=gpu,s3
# A wheel of relabel next to this file is found too.
RUN --mount=type=bind,target=/context pip install --find-links /context "relabel-ir[$EXTRAS]"
# Models are fetched into the mounted folder, and not into each container again.
ENV RELABEL_CACHE=/srv/relabel/cache
RUN install -d -o nobody /srv/relabel
USER nobody
ENTRYPOINT ["relabel"]
