// Roles and their assignments. Each assignment has a row in README.md with its reason; a test compares the two.
param prefix string
param containerName string
param dataStorageName string
param workspaceStorageName string
param settingsVaultName string
param registryName string
param workspaceName string
param networkName string
param nodesSubnetName string
param orchestratorPrincipalId string
param nodesPrincipalId string
param servingPrincipalId string
param nodesIdentityName string
param servingIdentityName string

var builtIn = {
  blobContributor: 'ba92f5b4-2d11-453d-a403-e96b0029c9fe' // Storage Blob Data Contributor
  blobReader: '2a2b9908-6ea1-4ae2-8e65-a410df84e7d1' // Storage Blob Data Reader
  secretsUser: '4633458b-17de-408a-b874-0445c86b69e6' // Key Vault Secrets User
  imagePull: '7f951dda-4ed3-4680-a7ca-43fe172d538d' // AcrPull
  identityOperator: 'f1a07417-d97a-45cb-824c-7a7467783830' // Managed Identity Operator
}

// Nodes may change run directories and their logs, but no datasets, code or models. One identity serves all jobs, so a
// condition cannot distinguish the run directories of different jobs.
var blobs = 'Microsoft.Storage/storageAccounts/blobServices/containers/blobs'
var changesNothing = '!(ActionMatches{\'${blobs}/write\'}) AND !(ActionMatches{\'${blobs}/add/action\'}) AND !(ActionMatches{\'${blobs}/delete\'}) AND !(ActionMatches{\'${blobs}/move/action\'})'
var changesRunDirectories = '((${changesNothing}) OR (@Resource[${blobs}:path] StringLike \'jobs/*\'))'
var changesLogs = '((${changesNothing}) OR (@Resource[${blobs}:path] StringLike \'ExperimentRun/*\'))'

resource dataStorage 'Microsoft.Storage/storageAccounts@2023-05-01' existing = {
  name: dataStorageName
}

resource dataBlobs 'Microsoft.Storage/storageAccounts/blobServices@2023-05-01' existing = {
  parent: dataStorage
  name: 'default'
}

resource container 'Microsoft.Storage/storageAccounts/blobServices/containers@2023-05-01' existing = {
  parent: dataBlobs
  name: containerName
}

resource workspaceStorage 'Microsoft.Storage/storageAccounts@2023-05-01' existing = {
  name: workspaceStorageName
}

resource settingsVault 'Microsoft.KeyVault/vaults@2023-07-01' existing = {
  name: settingsVaultName
}

resource registry 'Microsoft.ContainerRegistry/registries@2023-07-01' existing = {
  name: registryName
}

resource workspace 'Microsoft.MachineLearningServices/workspaces@2024-10-01-preview' existing = {
  name: workspaceName
}

resource network 'Microsoft.Network/virtualNetworks@2024-05-01' existing = {
  name: networkName
}

resource nodesSubnet 'Microsoft.Network/virtualNetworks/subnets@2024-05-01' existing = {
  parent: network
  name: nodesSubnetName
}

resource nodesIdentity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' existing = {
  name: nodesIdentityName
}

resource servingIdentity 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' existing = {
  name: servingIdentityName
}

resource orchestrates 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, prefix, 'dtrain orchestrates')
  properties: {
    roleName: 'dtrain orchestrates (${prefix})'
    description: 'Computes, jobs, models and endpoints of a workspace; not the workspace itself, and none of its secrets'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.MachineLearningServices/workspaces/read'
          'Microsoft.MachineLearningServices/workspaces/codes/read'
          'Microsoft.MachineLearningServices/workspaces/codes/write'
          'Microsoft.MachineLearningServices/workspaces/codes/versions/read'
          'Microsoft.MachineLearningServices/workspaces/codes/versions/write'
          'Microsoft.MachineLearningServices/workspaces/computes/read'
          'Microsoft.MachineLearningServices/workspaces/computes/write'
          'Microsoft.MachineLearningServices/workspaces/computes/delete'
          'Microsoft.MachineLearningServices/workspaces/computes/listNodes/action'
          'Microsoft.MachineLearningServices/workspaces/datastores/read'
          'Microsoft.MachineLearningServices/workspaces/datastores/listsecrets/action'
          'Microsoft.MachineLearningServices/workspaces/environments/read'
          'Microsoft.MachineLearningServices/workspaces/environments/write'
          'Microsoft.MachineLearningServices/workspaces/environments/versions/read'
          'Microsoft.MachineLearningServices/workspaces/environments/versions/write'
          'Microsoft.MachineLearningServices/workspaces/experiments/read'
          'Microsoft.MachineLearningServices/workspaces/experiments/write'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/read'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/submit/action'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/write'
          'Microsoft.MachineLearningServices/workspaces/jobs/read'
          'Microsoft.MachineLearningServices/workspaces/jobs/write'
          'Microsoft.MachineLearningServices/workspaces/jobs/cancel/action'
          'Microsoft.MachineLearningServices/workspaces/jobs/operationresults/read'
          'Microsoft.MachineLearningServices/workspaces/metadata/artifacts/read'
          'Microsoft.MachineLearningServices/workspaces/metadata/artifacts/write'
          'Microsoft.MachineLearningServices/workspaces/models/read'
          'Microsoft.MachineLearningServices/workspaces/models/write'
          'Microsoft.MachineLearningServices/workspaces/models/versions/read'
          'Microsoft.MachineLearningServices/workspaces/models/versions/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/read'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/delete'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/score/action'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/read'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/delete'
          'Microsoft.MachineLearningServices/workspaces/onlineendpoints/deployments/getlogs/action'
          'Microsoft.MachineLearningServices/workspaces/onlineendpoints/deployments/operationresults/read'
          'Microsoft.MachineLearningServices/workspaces/onlineendpoints/deployments/operationsstatus/read'
          'Microsoft.MachineLearningServices/workspaces/onlineendpoints/operationresults/read'
          'Microsoft.MachineLearningServices/workspaces/onlineendpoints/operationsstatus/read'
        ]
        notActions: []
        dataActions: []
        notDataActions: []
      }
    ]
  }
}

resource reportsMetrics 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, prefix, 'dtrain reports metrics')
  properties: {
    roleName: 'dtrain reports metrics (${prefix})'
    description: 'Runs and metrics of a workspace\'s experiments, and nothing else of it'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.MachineLearningServices/workspaces/read'
          'Microsoft.MachineLearningServices/workspaces/experiments/read'
          'Microsoft.MachineLearningServices/workspaces/experiments/write'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/read'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/write'
          'Microsoft.MachineLearningServices/workspaces/metrics/resource/write'
        ]
        notActions: []
        dataActions: []
        notDataActions: []
      }
    ]
  }
}

resource joinsSubnet 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, prefix, 'dtrain joins its subnet')
  properties: {
    roleName: 'dtrain joins its subnet (${prefix})'
    description: 'Puts computes into the subnet of the nodes'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.Network/virtualNetworks/subnets/read'
          'Microsoft.Network/virtualNetworks/subnets/join/action'
        ]
        notActions: []
        dataActions: []
        notDataActions: []
      }
    ]
  }
}

resource orchestratorOnWorkspace 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspace.id, orchestratorPrincipalId, 'orchestrates')
  scope: workspace
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: orchestrates.id
  }
}

resource orchestratorOnSubnet 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(nodesSubnet.id, orchestratorPrincipalId, 'joins')
  scope: nodesSubnet
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: joinsSubnet.id
  }
}

resource orchestratorOnNodesIdentity 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(nodesIdentity.id, orchestratorPrincipalId, builtIn.identityOperator)
  scope: nodesIdentity
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.identityOperator)
  }
}

resource orchestratorOnServingIdentity 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(servingIdentity.id, orchestratorPrincipalId, builtIn.identityOperator)
  scope: servingIdentity
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.identityOperator)
  }
}

resource orchestratorOnContainer 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(container.id, orchestratorPrincipalId, builtIn.blobContributor)
  scope: container
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.blobContributor)
  }
}

resource orchestratorOnWorkspaceStorage 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspaceStorage.id, orchestratorPrincipalId, builtIn.blobContributor)
  scope: workspaceStorage
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.blobContributor)
  }
}

resource orchestratorOnVault 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(settingsVault.id, orchestratorPrincipalId, builtIn.secretsUser)
  scope: settingsVault
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.secretsUser)
  }
}

resource nodesOnWorkspace 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspace.id, nodesPrincipalId, 'reports metrics')
  scope: workspace
  properties: {
    principalId: nodesPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: reportsMetrics.id
  }
}

resource nodesOnContainer 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(container.id, nodesPrincipalId, builtIn.blobContributor)
  scope: container
  properties: {
    principalId: nodesPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.blobContributor)
    condition: changesRunDirectories
    conditionVersion: '2.0'
  }
}

resource nodesOnWorkspaceStorage 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspaceStorage.id, nodesPrincipalId, builtIn.blobContributor)
  scope: workspaceStorage
  properties: {
    principalId: nodesPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.blobContributor)
    condition: changesLogs
    conditionVersion: '2.0'
  }
}

resource nodesOnImages 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(registry.id, nodesPrincipalId, builtIn.imagePull)
  scope: registry
  properties: {
    principalId: nodesPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.imagePull)
  }
}

resource servingOnWorkspaceStorage 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspaceStorage.id, servingPrincipalId, builtIn.blobReader)
  scope: workspaceStorage
  properties: {
    principalId: servingPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.blobReader)
  }
}

resource servingOnImages 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(registry.id, servingPrincipalId, builtIn.imagePull)
  scope: registry
  properties: {
    principalId: servingPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.imagePull)
  }
}
