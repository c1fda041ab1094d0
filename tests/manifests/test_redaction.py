"""No secret passes the door, and nothing else is harmed by it."""

import base64
import hashlib
import html
import json
import string
import uuid
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from relabel.manifests.secrets import (
    MASK,
    forget_secrets,
    keep_secret,
    names_secret,
    redacted,
    redacted_values,
    secret_in,
    secret_in_url,
    shortened,
)

SECRET = "Zq7" + "hunter2Xv9"
"""Put where each form has its secret; no form leaves more than three of its characters in a row."""
BODY = base64.b64encode(bytes(range(100, 132))).decode()
DER = "MC4CAQAwBQYDK2VwBCIEI" + BODY[:43]
LONG = base64.b64encode(bytes(range(150, 198))).decode()
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
PEM = f"-----BEGIN PRIVATE KEY-----\n{DER}\n-----END PRIVATE KEY-----\n"

URLS = [
    f"s3://AKIA:{SECRET}@bucket/pairs.parquet",
    f"s3://AKIA:{SECRET}/{SECRET}@bucket/pairs.parquet",
    f"s3://AKIA:a/{SECRET}@bucket/models/ecom@stable",
    f"s3://AKIA:a@b/{SECRET}@bucket/pairs.parquet",
    f"s3://{SECRET}@bucket/pairs.parquet",
    f"s3://AKIA:12/{SECRET}@bucket/pairs.parquet",
    f"s3://AKIA:a?{SECRET}@bucket/pairs.parquet",
    f"S3A://AKIA:{SECRET}#x@bucket/pairs.parquet",
    f"ftp://user:{SECRET}@host/out",
    f"sftp://user:{SECRET}:x@host:22/out",
    f"https://{SECRET}@host/pairs.parquet",
    f"https://user:%2F{SECRET}%40@host:8443/pairs.parquet",
    f"https://user:p/{SECRET}@host/pairs.parquet",
    f"https://:{SECRET}@host/pairs.parquet",
    f"simplecache::s3://AKIA:{SECRET}@bucket/x.parquet",
    f"zip://inner.parquet::https://user:{SECRET}@host/x.zip",
    f"filecache::zip://x::https://host/x.zip?sig={SECRET}",
    f"postgresql+psycopg://user:{SECRET}@host:5432/db?sslmode=require",
    f"https://host/x?jwt={SECRET}",
    f"https://host/x?a=1&auth={SECRET}",
    f"https://host/x?whatever={SECRET}",
    f"https://host/x?{SECRET}",
    f"s3://bucket/x?token={SECRET}",
    f"https://a.blob.core.windows.net/c/x?sv=2024-01-01&se=2026&sr=b&sp=r&sig={SECRET}%3D",
    f"https://storage.googleapis.com/b/o?X-Goog-Algorithm=GOOG4&X-Goog-Credential=me%40x&X-Goog-Signature={SECRET}",
    f"https://b.s3.amazonaws.com/o?X-Amz-Expires=60&X-Amz-Signature={SECRET}",
    f"https://host/x#access_token={SECRET}",
]
FRAMES: list[Callable[[str], str]] = [
    str,
    "relabel: {}: no such file.".format,
    "FileNotFoundError: [Errno 2] No such file or directory: '{}'".format,
    '{{"url": "{}", "rows": 3}}'.format,
    "`input.path` = ('{}',): want a file".format,
    "(see {}), then run again".format,
    "--set output={}".format,
    "<a href='{}'>x</a>".format,
    "first\n  second: {}\nthird".format,
]
SHAPES = [
    PEM,
    PEM.replace("\n", "\\n"),
    PEM.replace("\n", "\\\\n"),
    PEM.replace("\n", " "),
    quote(PEM, safe=""),
    quote_plus(PEM),
    PEM[: PEM.index("-----END")],
    "\ufeff  '" + DER + "'",
    DER,
    BODY,
    f'"{BODY}"',
    f"\ufeff{BODY}.",
    f"AccountKey={base64.b64encode(bytes(range(64))).decode()};EndpointSuffix=core",
    f"worker w0: {LONG}",
    JWT,
    f"authorization: Bearer {JWT}",
    "Authorization: Basic dXNlcjpodW50ZXIyaHVudGVyMg==",
    "{'authorization': 'Basic dXNlcjpodW50ZXIyaHVudGVyMg=='}",
    "Bearer abcdef0123456789xyz",
    "AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "AKIAIOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".replace(" = ", "="),
    "secret_access_key: wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "Incorrect API key provided: sk-proj-abcdefghijklmnop0123",
    "hf_abcdefghijklmnopqrstuvwxyz012345",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "host=db password=hunter2hunter2 user=me",
    "Server=db;Uid=me;Pwd=hunter2hunter2;",
    "GET /x?X-Amz-Signature=hunter2hunter2 HTTP/1.1",
    "HTTPSConnectionPool(host='h', port=443): Max retries exceeded with url: /x?sig=hunter2hunter2 (Caused by …)",
]
SHAPES += [  # found by attacking the door
    f"sv=2023-11-03&ss=b&srt=co&sp=rl&sig={SECRET}aaaa%2Bbbbb%3D",
    f"SharedAccessSignature=sv=1&sig={SECRET}",
    "Basic bWU6WnE3aHVudGVyMlh2OQ==",
    f"('Authorization', 'token {SECRET}')",
    f"x-api-key: {SECRET}",
    f"{{'X-Auth-Token': '{SECRET}'}}",
    f"Set-Cookie: session={SECRET}; Path=/",
    json.dumps({"client_secret": SECRET, "token": SECRET}),
    f"  in job.yaml, line 3: secret: {SECRET}",
    f"url [type=x, input_value='https://u:{SECRET}@h.../x', input_type=str]",
    f"No such option: --password {SECRET}",
    f"next=https%3A%2F%2Fu%3A{SECRET}%40h%2Fx",
    f"user:{SECRET}@tcp(db:3306)/x",
    f"s3:/AKIA:{SECRET}@bucket/x",
    f"s3//AKIA:{SECRET}@bucket/x",
    f"//user:{SECRET}@host/x",
    rf"https:\\u:{SECRET}@h\x",
    f"\x1b[31mhttps://u:{SECRET}@h/x\x1b[0m",
    f"https://u:\x1b[1m{SECRET}\x1b[0m@h/x",
    f"aws_secret_access_key = {SECRET}",
    f"export GITHUB_TOKEN={SECRET}",
    f"environ({{'MY_TOKEN': '{SECRET}'}})",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}b3BlbnNzaC1r",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQ{SECRET}\n=abcd\n-----END PGP PRIVATE KEY BLOCK-----",
    f"curl -u me:{SECRET} https://h/x",
    f"s3://b/x#token={SECRET}",
    f"ProxyError: http://me:{SECRET}@proxy:3128",
    f"fatal: could not read from 'https://oauth2:{SECRET}@gitlab.com/x.git/'",
]
HEX = hashlib.md5(b"x", usedforsecurity=False).hexdigest()
FIRST_LETTERS = """
    GOCSPX- 1//0g abc8Q~ whsec_ xapp-1- glrt- r8_ gsk_ xai- nvapi- hvs. pcsk_ lin_api_ ntn_ glsa_ ATATT3 dckr_pat_
    figd_ pplx- sk-ant-api03-
    sk_live_ rk_live_ ghs_ xoxb-1- npm_ pypi-AgE
"""
SHAPES += [  # whole headers, webhooks, tokens by their first letters, values between quotes
    (
        f'Authorization: Digest username="me", realm="", nonce="dcd98b71", uri="/x", qop=auth, nc=1, response="{HEX}", '
        'opaque="5ccc"'
    ),
    f'retry with Digest username="me", realm="r", nonce="dcd9", uri="/x", response="{HEX}"',
    f"Proxy-Authorization: Digest username=me, response={HEX}",
    f"Authorization: AWS4-HMAC-SHA256 Credential=me/20261122/eu/s3/aws4_request, SignedHeaders=host, Signature={HEX}",
    f"{{'Authorization': 'OAuth oauth_consumer_key=\"x\", oauth_signature=\"{SECRET}\"'}}",
    f"Authorization: Negotiate {SECRET}",
    f'Authorization: Hawk id="d", mac="{HEX}"',
    f"Bearer\t{SECRET}{SECRET}",
    f"https://hooks.slack.com/services/T0001/B0001/{SECRET}",
    f"Max retries exceeded with url: /services/T00012345/B00012345/{SECRET} (Caused by …)",
    f"https:\\/\\/hooks.slack.com\\/services\\/T0001\\/B0001\\/{SECRET}",
    quote(f"https://hooks.slack.com/services/T0001/B0001/{SECRET}", safe=""),
    f"https://discord.com/api/webhooks/123456789012345678/{SECRET}_{SECRET}",
    f"https://discordapp.com/api/v10/webhooks/123456789012345678/-{SECRET}_{SECRET}",
    f"https://outlook.office.com/webhook/aaaa@bbbb/IncomingWebhook/{SECRET}/cccc",
    f"https://x.webhook.office.com/webhookb2/aaaa@bbbb/IncomingWebhook/{SECRET}/cccc",
    f"https://api.telegram.org/bot123456789:AAF{SECRET}{SECRET}{SECRET}/sendMessage",
    f"https://hooks.zapier.com/hooks/catch/12345/{SECRET}/",
    f"https://mm.example.org/hooks/{SECRET.lower()}{SECRET.lower()}",
    f"https://maker.ifttt.com/trigger/x/with/key/{SECRET}",
    *(f"{letters}{SECRET}{SECRET}{SECRET}" for letters in FIRST_LETTERS.split()),
    *(f"{letters}{HEX}{HEX[:16]}" for letters in ("dop_v1_", "dapi", "rubygems_", "sbp_")),
    f"shpat_{HEX}",
    f"eyJhbGciOiJSU0Et.eyJhbGciOiJSU0Et.aaaaaaaaaaaa.bbbbbb.{SECRET}",
    f"PuTTY-User-Key-File-3: x\nPublic-Lines: 1\nAAAA\nPrivate-Lines: 1\n{SECRET}\nPrivate-MAC: {HEX}",
    f"---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nComment: x\n{SECRET}\n---- END SSH2 ENCRYPTED PRIVATE KEY ----",
    f"-----BEGIN X9.42 DH PRIVATE-KEY-----\n{SECRET}\n-----END X9.42 DH PRIVATE-KEY-----",
    f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,{HEX}\n\n{SECRET}{SECRET}\n",
    json.dumps({"type": "service_account", "private_key_id": "3f2a", "private_key": PEM, "client_email": "me@x"}),
    f"jdbc:oracle:thin:scott/{SECRET}@//h:1521/x",
    f"jdbc:postgresql://h/db?user=u&password={SECRET}",
    f"password='two words {SECRET}'",
    f'{{"password": "a b {SECRET}"}}',
    f"password=ab){SECRET}",
    f"DB_PASS={SECRET}",
    f"smtp_pass: {SECRET}",
    f"machine h login me password {SECRET}",
    f'{{"auths": {{"h": {{"auth": "{SECRET}"}}}}}}',
    f"Ocp-Apim-Subscription-Key: {HEX}",
    f"encryption_key={SECRET}",
    f"curl --user me:{SECRET} h",
    f"next=https%253A%252F%252Fu%253A{SECRET}%2540h%252Fx",
    f"https:\\/\\/u:{SECRET}@h\\/x",
    f"password%3D{SECRET}",
    f"&quot;password&quot;: &quot;{SECRET}&quot;",
    f"<password>{SECRET}</password>",
    f"{{'Set-Cookie': 'sid={SECRET}'}}",
    f"('password', '{SECRET}')",
    f"[(b'x-api-key', b'{SECRET}')]",
    f'"password" => "{SECRET}"',
    f"password := {SECRET}",
    f"connect('me', password=b'{SECRET}')",
    f"environ[b'API_TOKEN'] = b'{SECRET}'",
]
TELLTALES = [
    "hunter2",
    HEX[4:],
    DER[30:40],
    BODY[10:20],
    LONG[20:30],
    JWT[25:40],
    "wJalrXUt",
    "MDENG",
    "abcdef",
    "dXNlcjpo",
]
TELLTALES += ["AAECAwQFBg", "aHVudGVy"]

SURVIVE = [
    hashlib.sha256(b"x").hexdigest(),
    hashlib.sha1(b"x").hexdigest(),
    "key_id 3f2a9c01b7d3e855, sha256 " + hashlib.sha256(b"y").hexdigest(),
    hashlib.sha512(b"z").hexdigest(),
    str(uuid.UUID(int=7)),
    "labels/shard-00003/chunk-000017-6add17ce1acf17bd.parquet",
    "receipts/shard-00003/chunk-000017.2.json",
    "s3://bucket/models/ecom@stable: points to 4f2a9c01b7d3e855 (sequence 3).",
    "http://minio:9000/models/ecom@stable",
    "http://[::1]:9000/models/ecom@stable",
    "memory://box@account/keys=1/pairs.parquet",
    "abfs://box@account.dfs.core.windows.net/keys/pairs.parquet",
    "sftp://me@host:22/pairs.parquet",
    "hf:org/name@main, digest 4f2a9c01b7d3",
    "pypi:PACKAGE==1.2.3",
    "s3://bucket/dt=2026-11-20/part-?.parquet",
    "s3://bucket/**/part-???-x=1.parquet",
    "/data/token=3/keys=1/secret-santa/password-study/part-00000-of-00128.parquet: no such file",
    "/home/me/projects/relabel/out/ecom/labels/shard00003/chunk000017/part",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or storage_options",
    "engine.args.api_key_env: the variable OPENAI_API_KEY is not set; set it to the server's key.",
    "--set engine.seed: want KEY=VALUE, for instance --set output=out/b",
    "prompt_tokens 812, output_tokens=33, max_text_tokens: 160",
    '{"error": "InputError", "message": "row 17 has no query_id", "exit_code": 3}',
    "no signature of a trusted key; key_id=3f2a9c01b7d3e855",
    "2026-11-20T12:00:00Z row 17 quarantined as format: score is '7', expected one of 0, 1, 2",
    "host-1234-w0 took over shard 00003; 120 rows in = 118 labelled + 0 reused + 2 quarantined",
    "http://127.0.0.1:8000/v1",
    "Is it so? a=b, c=d",
    "the password: it is not shown",
    "https://en.wikipedia.org/wiki/Dog_Day_Afternoon#References_in_popular_culture. And so on",
    "Cord Compatible with iPhone/XS/XR/X/8/8Plus/7/7Plus/6S/6Plus/Pad More",
    "/list.php?page=2&sort=new and o.style?o.left=e:f",
    "columns are ['id', 'token', 'text', 'title2'], want `password`, `secret` or `key`",
    "/repo/.git/hooks/pre-commit-of-2026 and src/hooks/useState.ts, api/webhooks.md",
    "services/teams/T1/x and /services/Tools/Build/main",
    "Digest of the plan: 3f2a9c01b7d3e855, digest uri is x",
    "basic knowledge of 12 things, bearer of 3 letters",
    "The login page wants a password twice",
    "--- BEGIN ---",
    "sk-learn, hf_tokenizers_of_ours, gl-matrix-4, xai-methods, 2.hvs.x",
    str(2**200),
    base64.b64encode(b"query,document,grade\nshoes,red shoes of leather,3\n").decode(),
]


@pytest.mark.parametrize("url", URLS)
def test_a_url_shows_neither_user_nor_query_in_whatever_is_around_it(url: str) -> None:
    assert secret_in_url(url)
    for frame in FRAMES:
        shown = redacted(frame(url))
        assert "hunter2" not in shown
        assert redacted(shown) == shown
        assert MASK in shown
    assert json.loads(redacted(FRAMES[3](url)))["rows"] == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_what_has_the_form_of_a_key_or_token_is_masked(shape: str) -> None:
    for text in (
        shape,
        f"relabel: {shape}: no such file",
        repr(shape),
        json.dumps({"message": shape}),
        f"a\n{shape}\nb",
    ):
        shown = redacted(text)
        assert MASK in shown
        assert not [telltale for telltale in TELLTALES if telltale in shown], shown
        assert redacted(shown) == shown
    json.loads(redacted(json.dumps({"message": shape, "rows": 3})))


@pytest.mark.parametrize("text", SURVIVE)
def test_what_is_no_secret_survives(text: str) -> None:
    keep_secret("something-else-of-ours", "a test")
    assert redacted(text) == text
    assert secret_in(text) is None


PASSWORDS = st.text(string.ascii_letters + string.digits + "/@:%+=?#&!$,;~._-", min_size=8, max_size=40)


@given(
    password=PASSWORDS,
    user=st.text(string.ascii_letters, min_size=1, max_size=12),
    scheme=st.sampled_from(["s3", "gs", "https", "sftp"]),
)
def test_any_password_in_a_url_is_masked(password: str, user: str, scheme: str) -> None:
    head = password.partition("/")[0]
    assume(scheme in ("s3", "gs") or not ("/" in password and head.isdecimal()))  # a port, by every parser's reading
    assume("::" not in password)
    url = f"{scheme}://{user}:{password}@bucket/pairs.parquet"
    assert secret_in_url(url)
    assert redacted(f"{url}: no such file") == f"{scheme}://{MASK}@bucket/pairs.parquet: no such file"


SECRETS = st.text(min_size=8, max_size=60).map(str.strip).filter(lambda text: len(text) >= 8 and MASK not in text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=SECRETS, before=st.text(max_size=10), after=st.text(max_size=10))
def test_a_value_that_was_given_is_masked_in_every_form_it_is_written_in(secret: str, before: str, after: str) -> None:
    forget_secrets()
    keep_secret(secret, "a test")
    raw = secret.encode(errors="replace")
    forms = {
        secret,
        repr(secret)[1:-1],
        json.dumps(secret)[1:-1],
        html.escape(secret),
        quote(secret, errors="replace"),
        quote_plus(secret),
    }
    forms.add(base64.b64encode(raw).decode().rstrip("="))
    forms |= {json.dumps(json.dumps(secret)[1:-1])[1:-1], raw.hex()}
    for form in forms:
        assert form not in redacted(f"{before}{form}{after}")
    assert "\n" in secret or secret not in str(redacted_values([{"a": [before + secret]}]))


SEGMENTS = st.text(string.ascii_lowercase + string.digits + "._-=", min_size=1, max_size=20)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=6).map("/".join)


@given(
    path=PATHS,
    digest=st.binary(max_size=9),
    row=st.integers(0, 10**12),
    root=st.sampled_from(["", "/", "s3://bucket/", "http://h:9000/"]),
)
def test_paths_digests_and_row_ids_survive(path: str, digest: bytes, row: int, root: str) -> None:
    hexed = hashlib.sha256(digest).hexdigest()
    assume(not any(word in path for word in ("pwd", "sig=", "jwt=", "key=", "token=", "secret", "pass")))
    text = f"{root}{path}/chunk-{row:06d}-{hexed[:16]}.parquet: sha256 {hexed}, row {row}"
    assert redacted(text) == text


@pytest.mark.parametrize("before", ["", "u", "us", "me:", "user:"])
def test_a_value_that_was_given_is_masked_within_longer_base64(before: str) -> None:
    keep_secret(SECRET, "a test")
    shown = redacted(f"sent {base64.b64encode(f'{before}{SECRET}:more'.encode()).decode()} to the server")
    assert MASK in shown
    left = shown.split()[1].partition(MASK)[0]
    assert SECRET[2:6].encode() not in base64.b64decode(left + "A" * (-len(left) % 4))


def test_what_is_shortened_shows_no_part_of_a_secret() -> None:
    for most in range(12, 60):
        shown = shortened(f"can't read https://user:{SECRET}@host.example.org/models/ecom.parquet, try again", most)
        assert "Zq7" not in shown
        assert len(shown) <= most


def test_lines_of_a_secret_of_many_lines_are_masked_one_by_one() -> None:
    keep_secret("first-line-of-it\nsecond-line-of-it", "a test")
    assert redacted("w0: first-line-of-it") == f"w0: {MASK}"
    assert redacted("w0: second-line-of-it") == f"w0: {MASK}"


PARTS = [
    "x",
    "a/b-c_d.e:",
    "=/+",
    "?a=",
    "-----BEGIN X-----",
    "https://h/x ",
    "://",
    "b@",
    "authorization: ",
    "token",
    "key-",
    "a::b://",
]
PARTS += [
    "password='",
    "<token",
    "jdbc:oracle:x:",
    "private-lines: ",
    "Digest uri=",
    "/hooks/",
    "--- BEGIN ",
    "login a ",
    "&quot;",
]
PARTS += [
    "https%3A%2F%2F",
    "?a=b&",
    "\\",
    "Proc-Type: x\n",
    "password: 'a",
    "-----BEGIN X-----\nA: b\n",
    "1a8Q~",
    "eyJa.",
]
PARTS += ["/with/key/", 'authorization: a="b"']


@pytest.mark.parametrize("part", PARTS)
def test_the_time_grows_with_the_text(part: str) -> None:
    """A pattern that goes back and forth would take minutes over these, and the test its time limit."""
    redacted("s3://a:" + part * (100_000 // len(part)))


def test_a_prompt_that_speaks_of_tokens_is_no_secret() -> None:
    assert secret_in("Write a single token: relevant, or the password: something-else") is None


def test_a_short_value_is_no_secret() -> None:
    keep_secret("abc", "a test")
    assert redacted("abc") == "abc"


NAMES_OF_SECRETS = """
    PGPASSWORD DBPASSWORD GITHUB_PAT2 MYSECRETS APIKEY MYAPIKEY3 SIGNKEY accountKey x-amz-signature X-Amz-Credential
    sig jwt auth
    AUTHORIZATION DB_DSN CONN_STRING CONNECTION_STRING MYSQL_PWD DbPass SASL_PASSPHRASE TLS_CERT PRIVATE_PEM
    BASIC_AUTH2 sas_token
    HF_TOKEN TOKENS secret
"""
INNOCENT_NAMES = """
    MONKEY REGION AUTHOR AUTHORS PATH PYTHONPATH PATTERN TOKENIZER TOKENIZERS_PARALLELISM PASSAGE_COLUMN KEYWORDS
    DAY output limit versionId
    download COMPASS CONNECTIONS CREDITS signals SASKATOON PWD OLDPWD
"""


@pytest.mark.parametrize("name", NAMES_OF_SECRETS.split())
def test_a_name_of_a_secret_is_known(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize("name", INNOCENT_NAMES.split())
def test_an_innocent_name_is_known_too(name: str) -> None:
    assert not names_secret(name)
    assert not names_secret("MAX_TOKENS", "8192")


@pytest.mark.parametrize("name", ["max_prompt_tokens", "WINDOW_TOKENS", "--batch-tokens", "tokens_per_batch"])
def test_a_number_next_to_a_limit_is_no_secret_however_long(name: str) -> None:
    assert not names_secret(name, "10000000")
    assert not names_secret(name, "-1.5e+10")
    assert names_secret(name, "10000000x")


@pytest.mark.parametrize("name", ["password", "api_token", "API_KEYS", "max_token", "tokens", "max_tokens_key"])
def test_a_long_number_next_to_a_name_of_a_secret_is_one(name: str) -> None:
    assert names_secret(name, "10000000")
