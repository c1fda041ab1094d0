# A machine that serves: docker run -v /srv/models:/srv/models IMAGE s3://bucket/models/ecom@stable /srv/models/ecom --key relabel.pub
# pull.py and the public key are next to this file. Without signatures, leave out the RUN line, and relabel.pub in the COPY line.
FROM python:3.12-slim
RUN pip install cryptography
COPY pull.py relabel.pub /opt/pull/
WORKDIR /opt/pull
USER nobody
ENTRYPOINT ["python3", "pull.py"]
