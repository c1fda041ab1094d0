# A machine that serves: docker run -v /srv/models:/srv/models IMAGE s3://bucket/models/ecom@stable /srv/models/ecom --key relabel.pub
# pull.py and the public key lie beside this file. Without signatures the RUN line may go, and relabel.pub in the COPY line.
FROM python:3.12-slim
RUN pip install cryptography
COPY pull.py relabel.pub /opt/pull/
WORKDIR /opt/pull
USER nobody
ENTRYPOINT ["python3", "pull.py"]
