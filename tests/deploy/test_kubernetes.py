"""deploy/kubernetes: the API takes each manifest, and the processes understand their settings."""

import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from batonmq.broker.main import SECTIONS as BROKER_SECTIONS
from batonmq.namesrv.main import SECTIONS as NAMESRV_SECTIONS
from batonmq.replicas_manager.config import controller_addresses
from batonmq.runtime.settings import load_settings
from tests.deploy.conftest import DEPLOY, says

KUBERNETES = DEPLOY / "kubernetes"
API_VERSIONS = ("1.28", "1.37")
"""The oldest that the chart allows, and the newest of which the package has schemas."""
NAMESPACE = "mq"
TLS = {"secret": "certs", "mode": "permissive", "dial": False}
CHANGED: dict[str, Any] = {
    "groups": ["broker-a", "broker-b"],
    "storageClass": "fast",
    "serviceMonitor": True,
    "externalDomain": "mq.example.com",
    "tls": TLS,
}
_REFERENCE = re.compile(r"\$\((\w+)\)")


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RENDER = load_module(KUBERNETES / "render.py")


@cache
def defaults() -> str:
    return (KUBERNETES / "chart" / "values.yaml").read_text()


def manifests(**chosen: Any) -> list[dict[str, Any]]:
    """What the chart makes of its values, `chosen` over them."""
    text = RENDER.render(yaml.safe_load(defaults()) | chosen)
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(kind: str, documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def environ(stateful_set: dict[str, Any], index: int) -> dict[str, str]:
    """Of the pod with that index, as the kubelet expands it: in order, each from those before."""
    name = stateful_set["metadata"]["name"]
    fields = {
        "metadata.name": f"{name}-{index}",
        "metadata.namespace": NAMESPACE,
        "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
    }
    found: dict[str, str] = {}
    for entry in stateful_set["spec"]["template"]["spec"]["containers"][0]["env"]:
        if "value" in entry:
            found[entry["name"]] = _REFERENCE.sub(lambda m: found[m[1]], entry["value"])
        else:
            found[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return found


@pytest.mark.parametrize("version", API_VERSIONS)
def test_the_api_takes_every_manifest(version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    every = manifests(**CHANGED)
    for document in (*manifests(), *every):
        if document["kind"] == "ServiceMonitor":
            continue  # of the Prometheus operator: no part of the API
        kubernetes_validate.validate(document, version, strict=True)
    names = [(d["kind"], d["metadata"]["name"]) for d in every]
    assert len(set(names)) == len(names)


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    """After a change: `python deploy/kubernetes/render.py > deploy/kubernetes/batonmq.yaml`."""
    assert (KUBERNETES / "batonmq.yaml").read_text() == RENDER.render(yaml.safe_load(defaults()))


@pytest.mark.parametrize("domain", ["", "mq.example.com"])
def test_every_pod_starts_with_names_that_lead_to_it(domain: str) -> None:
    sets = of_kind("StatefulSet", manifests(groups=["broker-a"], externalDomain=domain))
    inner = f"{NAMESPACE}.svc.cluster.local"
    servers = [f"batonmq-namesrv-{i}.batonmq-namesrv.{inner}" for i in range(3)]
    for index in range(3):
        file = DEPLOY / "config" / "namesrv.yaml"
        env = environ(sets["batonmq-namesrv"], index)
        found: dict[str, Any] = dict(load_settings(file, NAMESRV_SECTIONS, environ=env))
        controller = found["controller"]
        assert [peer.host for peer in controller.peers] == servers
        assert controller.self_peer.host == servers[index]
        assert found["namesrv"].listen_port == 9876

        env = environ(sets["batonmq-broker-a"], index)
        file = DEPLOY / "config" / "broker.yaml"
        found = dict(load_settings(file, BROKER_SECTIONS, environ=env))
        broker, pod = found["broker"], f"batonmq-broker-a-{index}"
        own = f"{pod}.batonmq-broker.{inner}"
        assert broker.address == f"{pod}.{domain}:10911" if domain else f"{own}:10911"
        assert (broker.ha_ip, broker.bind_host) == (own, "0.0.0.0")
        assert broker.name_servers == tuple(f"{server}:9876" for server in servers)
        dialled = controller_addresses(found["replicas"].controller_addr, "", "grpc")
        assert dialled == tuple(f"{server}:9879" for server in servers)


def test_a_secret_with_certificates_turns_tls_on_in_every_process() -> None:
    sets = of_kind("StatefulSet", manifests(tls=TLS))
    for name, kind, sections in (
        ("batonmq-namesrv", "namesrv", NAMESRV_SECTIONS),
        ("batonmq-broker-a", "broker", BROKER_SECTIONS),
    ):
        env = environ(sets[name], 0)
        tls = load_settings(DEPLOY / "config" / f"{kind}.yaml", sections, environ=env)["tls"]
        pod = sets[name]["spec"]["template"]["spec"]
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        (volume,) = (v for v in pod["volumes"] if v["name"] == "tls")
        assert volume["secret"]["secretName"] == "certs"
        assert (tls.server_mode, tls.tls_enable) == ("permissive", False)
        for path, key in (
            (tls.server_cert_path, "tls.crt"),
            (tls.server_key_path, "tls.key"),
            (tls.server_trust_cert_path, "ca.crt"),
            (env["BATONMQ_TLS_TRUST"], "ca.crt"),
        ):
            assert str(path) == f"{mounts['tls']}/{key}"


@pytest.mark.parametrize("changed", [False, True])
def test_helm_itself_makes_the_same_manifests(tmp_path: Path, changed: bool) -> None:
    """`.ci/run` installs helm 4 from a wheel; `GOBIN=DIR go install
    helm.sh/helm/v3/cmd/helm@v3.18.6` makes helm 3 in four minutes."""
    values = CHANGED if changed else {}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    version = f"{API_VERSIONS[0]}.0"  # helm made by `go install` takes an older one for granted
    words = ("template", "batonmq", KUBERNETES / "chart", "-f", file, "--kube-version", version)
    made = says("helm", *words)

    def ordered(documents: Iterable[Any]) -> list[Any]:
        return sorted(filter(None, documents), key=lambda d: (d["kind"], d["metadata"]["name"]))

    assert ordered(yaml.safe_load_all(made)) == ordered(manifests(**values))


def test_ports_probes_and_policies_name_what_listens() -> None:
    documents = manifests(serviceMonitor=True)
    policies, services = of_kind("NetworkPolicy", documents), of_kind("Service", documents)
    for name, stateful_set in of_kind("StatefulSet", documents).items():
        pod = stateful_set["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe, path in (
            ("startupProbe", "/livez"),
            ("livenessProbe", "/livez"),
            ("readinessProbe", "/readyz"),
        ):
            assert container[probe]["httpGet"] == {"path": path, "port": "metrics"}
        service = services[stateful_set["spec"]["serviceName"]]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == ports
        allowed = {
            port["port"]
            for policy in policies.values()
            if policy["spec"]["podSelector"]["matchLabels"].items()
            <= pod["metadata"]["labels"].items()
            for rule in policy["spec"]["ingress"]
            for port in rule["ports"]
        }
        assert allowed == set(ports.values()), name
        budgets = of_kind("PodDisruptionBudget", documents).values()
        (budget,) = (
            b
            for b in budgets
            if b["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        )
        assert budget["spec"]["maxUnavailable"] == 1
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/var/lib/batonmq", "/tmp"} <= mounts


def test_a_value_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    RENDER.main(["broker.storage=7Gi", "groups=[one]"])
    sets = of_kind("StatefulSet", list(yaml.safe_load_all(capsys.readouterr().out)))
    (claim,) = sets["batonmq-one"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    with pytest.raises(SystemExit, match=r"broker\.sotrage: chart/values\.yaml has no such value"):
        RENDER.main(["broker.sotrage=7Gi"])
    with pytest.raises(RENDER.RenderError, match=r"\.Values\.groups: there is no such value"):
        RENDER.render({})
