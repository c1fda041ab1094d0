# A machine that labels: docker run -v /srv/relabel:/srv/relabel IMAGE run /srv/relabel/jobs/ecom.yaml --shard 0/1
FROM python:3.12-slim
RUN pip install 'relabel-ir[cpu]'
# Models are fetched into the mounted folder, and not anew into each container.
ENV RELABEL_CACHE=/srv/relabel/cache
USER nobody
ENTRYPOINT ["relabel"]
