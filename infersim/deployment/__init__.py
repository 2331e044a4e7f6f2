"""A description made concrete: replicas of a model on a kind of device, resolved, checked, lowered to the engine."""

from .kinds import deployment_of, deployments_of, encoder_of, served_name
from .lower import Deployment, EncoderDeployment
from .resolve import deploy, resolve

__all__ = [
    "Deployment",
    "EncoderDeployment",
    "deploy",
    "deployment_of",
    "deployments_of",
    "encoder_of",
    "resolve",
    "served_name",
]
