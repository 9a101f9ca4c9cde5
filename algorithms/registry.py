"""The methods by name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from medsilo.algorithms.apple import Apple
from medsilo.algorithms.ditto import Ditto
from medsilo.algorithms.diversifed import DiversiFed
from medsilo.algorithms.fedamp import FedAMP
from medsilo.algorithms.fedap import FedAP
from medsilo.algorithms.fedavg import FedAvg
from medsilo.algorithms.fedbabu import FedBABU
from medsilo.algorithms.fedbn import FedBN
from medsilo.algorithms.fedcac import FedCAC
from medsilo.algorithms.feddbe import FedDBE
from medsilo.algorithms.feddfq import FedDFQ
from medsilo.algorithms.feddyn import FedDyn
from medsilo.algorithms.fedfomo import FedFomo
from medsilo.algorithms.fedgh import FedGH
from medsilo.algorithms.fedpdc import FedPDC
from medsilo.algorithms.fedper import FedPer
from medsilo.algorithms.fedproto import FedProto
from medsilo.algorithms.fedprox import FedProx
from medsilo.algorithms.fedrep import FedRep
from medsilo.algorithms.fedrod import FedRoD
from medsilo.algorithms.local import Local
from medsilo.algorithms.method import Method
from medsilo.algorithms.moon import Moon
from medsilo.algorithms.mrmtl import MRMTL
from medsilo.algorithms.own_code import load
from medsilo.algorithms.perfedavg import PerFedAvg
from medsilo.algorithms.pfedme import PFedMe
from medsilo.algorithms.pfedsim import PFedSim
from medsilo.algorithms.ridge import Ridge
from medsilo.algorithms.scaffold import Scaffold
from medsilo.privacy.errors import ConfigurationError

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Local,
        FedAvg,
        DiversiFed,
        PFedSim,
        FedDFQ,
        FedPDC,
        FedProx,
        Scaffold,
        Moon,
        FedDyn,
        PerFedAvg,
        PFedMe,
        Ditto,
        FedAMP,
        FedFomo,
        Apple,
        FedPer,
        FedRep,
        FedBN,
        FedBABU,
        FedRoD,
        FedProto,
        FedCAC,
        FedAP,
        FedGH,
        FedDBE,
        MRMTL,
        Ridge,
    )
}


def make(name: str, parameters: Mapping[str, Any], *, trusted: tuple[str, ...] = ()) -> Method:
    """The method of that name with the given hyper-parameters, the others at their defaults.

    ``name`` may also be ``package.module:Class``, a method of one's own; it runs code of this machine, so it must stand
    in ``trusted``.

    Raises ``ConfigurationError`` naming an unknown method or hyper-parameter, the nearest valid one, or a value of
    the wrong kind.
    """
    method = _own(name, trusted) if ":" in name else METHODS.get(name)
    if method is None:
        raise ConfigurationError(f"method {name!r} is not known{_nearest(name, METHODS)}")
    kinds = get_type_hints(method)
    known = [item.name for item in dataclasses.fields(method)]
    checked = {}
    for key, value in parameters.items():
        if key not in known:
            raise ConfigurationError(f"{name} has no hyper-parameter {key!r}{_nearest(key, known)}")
        checked[key] = _checked(f"{name}: {key}", value, kinds[key])
    return method(**checked)


def _own(name: str, trusted: tuple[str, ...]) -> type[Method]:
    untrusted = (
        "; an experiment may run it if it stands under `trusted_methods:`, a federation only if it is in the registry "
        "of every party (docs/adding-a-method.md)"
    )
    found = load("method", name, trusted, untrusted=untrusted)
    if not (isinstance(found, type) and issubclass(found, Method) and dataclasses.is_dataclass(found)):
        raise ConfigurationError(f"method {name!r} is no dataclass that derives from medsilo.algorithms.method.Method")
    return found


def _checked(what: str, value: Any, kind: Any) -> Any:
    if NoneType in get_args(kind):
        if value is None:
            return None
        (kind,) = (other for other in get_args(kind) if other is not NoneType)
    if get_origin(kind) is Literal:
        fits = value in get_args(kind)
        wanted = " or ".join(str(choice) for choice in get_args(kind))
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
        wanted = "a number"
    else:
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        wanted = f"a value of type {kind.__name__}"
    if not fits:
        raise ConfigurationError(f"{what} is {value!r}; it should be {wanted}")
    return value


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known) or 'none'}"
