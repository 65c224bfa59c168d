"""TLS and tokens of the command line: against a real server, and what is said when something is missing."""

import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest

from rpc.tls import ServerTls
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem_cli.client import connect
from tandem_cli.trust import RouterAddress, Trust
from tests.certificates import Authority

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-that-nobody-guesses"


class Models(pb_grpc.InferenceServiceServicer):
    """Tells the names of its models to those who show the token and a certificate."""

    async def ListModels(self, request, context):  # noqa: N802
        shown = dict(context.invocation_metadata())["authorization"], context.auth_context()["x509_common_name"]
        assert shown == (f"Bearer {TOKEN}", [b"client"])
        return pb.ListModelsResponse(models=[pb.Model(name="m")])


@pytest.mark.slow
async def test_a_router_is_called_with_a_certificate_and_a_token(tmp_path):
    authority = Authority(tmp_path)
    pair, client = authority.sign("router"), authority.sign("client")
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(Models(), server)
    credentials = ServerTls(pair.cert, pair.key, authority.path).credentials()
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    trust = Trust(ca_file=authority.path, cert_file=client.cert, key_file=client.key, name="router", token=TOKEN)
    async with connect(RouterAddress(f"127.0.0.1:{port}", trust)) as stub:
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models[0].name == "m"
    await server.stop(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tls-ca", "/nowhere/ca.pem"), "--tls-ca: /nowhere/ca.pem cannot be read: No such file or directory"),
        (("--tls-cert", "x"), "--tls-key is required, because --tls-cert is given"),
        (("--token-file", "/nowhere/token"), "--token-file /nowhere/token cannot be read: No such file or directory"),
    ],
)
def test_what_is_missing_is_a_bad_option(options, words):
    argv = [sys.executable, "-m", "tandem_cli", *options, "get", "r1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.strip()) == (2, f"tandem: {words}")
