"""What the service adds to a job's tags and properties, beside those that were sent."""

from __future__ import annotations

TAGS = {
    # As recorded (azure-powershell, Get-AzMLWorkspaceJob.Recording.json at 49be303a).
    "_aml_system_ComputeTargetStatus": '{"AllocationState":"steady","PreparingNodeCount":0,"RunningNodeCount":0,'
    '"CurrentNodeCount":1}',
    # What MLflow's client leaves on the run that is the job (MLflow's list of system tags).
    "mlflow.user": "Emulated Identity",
    "mlflow.source.name": "train.py",
}


def system_properties(cluster: str) -> dict[str, str]:
    """The first as recorded (there), what is of git as documented (Azure ML, concept-train-model-git-integration)."""
    return {
        "_azureml.ComputeTargetType": "amlctrain",
        "_azureml.ClusterName": cluster,
        "ProcessInfoFile": "azureml-logs/process_info.json",
        "ProcessStatusFile": "azureml-logs/process_status.json",
        "azureml.git.branch": "main",
        "azureml.git.dirty": "True",
        "mlflow.source.git.commit": "0" * 40,
    }
