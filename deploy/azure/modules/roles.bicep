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

// Nodes may change run directories and their logs, but no datasets, code or models. Their role has no operation on
// containers ("Storage Blob Data Contributor" may delete them, whatever a condition says, because conditions bind only
// operations on blobs). One identity serves all jobs, so a condition cannot distinguish the run directories of different
// jobs.
var blobs = 'Microsoft.Storage/storageAccounts/blobServices/containers/blobs'
var changesNothing = '!(ActionMatches{\'${blobs}/write\'}) AND !(ActionMatches{\'${blobs}/add/action\'}) AND !(ActionMatches{\'${blobs}/delete\'}) AND !(ActionMatches{\'${blobs}/move/action\'})'
var changesRunDirectories = '((${changesNothing}) OR (@Resource[${blobs}:path] StringLike \'jobs/*\'))'
var changesLogs = '((${changesNothing}) OR (@Resource[Microsoft.Storage/storageAccounts/blobServices/containers:name] StringEquals \'azureml\' AND @Resource[${blobs}:path] StringLike \'ExperimentRun/*\'))'

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
    description: 'Computes, jobs, models and endpoints of a workspace, and reading all of it; it cannot change the workspace itself'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          // What Microsoft documents as the least for submitting jobs (how-to-assign-roles, "Submitting any type of run (V2)").
          'Microsoft.MachineLearningServices/workspaces/*/read'
          'Microsoft.MachineLearningServices/workspaces/environments/write'
          'Microsoft.MachineLearningServices/workspaces/jobs/*'
          'Microsoft.MachineLearningServices/workspaces/metadata/artifacts/write'
          'Microsoft.MachineLearningServices/workspaces/metadata/codes/*/write'
          'Microsoft.MachineLearningServices/workspaces/environments/build/action'
          'Microsoft.MachineLearningServices/workspaces/environments/readSecrets/action'
          // What dtrain's client asks for besides that: computes, code, runs, models, endpoints.
          'Microsoft.MachineLearningServices/workspaces/read'
          'Microsoft.MachineLearningServices/workspaces/codes/write'
          'Microsoft.MachineLearningServices/workspaces/codes/versions/write'
          'Microsoft.MachineLearningServices/workspaces/computes/write'
          'Microsoft.MachineLearningServices/workspaces/computes/delete'
          'Microsoft.MachineLearningServices/workspaces/computes/listNodes/action'
          'Microsoft.MachineLearningServices/workspaces/datastores/listsecrets/action'
          'Microsoft.MachineLearningServices/workspaces/environments/versions/write'
          'Microsoft.MachineLearningServices/workspaces/experiments/write'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/submit/action'
          'Microsoft.MachineLearningServices/workspaces/experiments/runs/write'
          'Microsoft.MachineLearningServices/workspaces/models/write'
          'Microsoft.MachineLearningServices/workspaces/models/versions/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/score/action'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/delete'
          'Microsoft.MachineLearningServices/workspaces/onlineendpoints/deployments/getlogs/action'
          // For `dtrain doctor`: what this very identity may do here.
          'Microsoft.Authorization/permissions/read'
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

resource writesBlobs 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, prefix, 'dtrain writes blobs')
  properties: {
    roleName: 'dtrain writes blobs (${prefix})'
    description: 'Reads and writes blobs, as far as the condition of the assignment lets it; makes and deletes no container'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.Storage/storageAccounts/blobServices/containers/read'
        ]
        notActions: []
        dataActions: [
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/read'
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/write'
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/add/action'
          'Microsoft.Storage/storageAccounts/blobServices/containers/blobs/delete'
        ]
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
          'Microsoft.Authorization/permissions/read'
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

resource orchestratorOnImages 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(registry.id, orchestratorPrincipalId, builtIn.imagePull)
  scope: registry
  properties: {
    principalId: orchestratorPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', builtIn.imagePull)
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
  name: guid(container.id, nodesPrincipalId, 'writes blobs')
  scope: container
  properties: {
    principalId: nodesPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: writesBlobs.id
    condition: changesRunDirectories
    conditionVersion: '2.0'
  }
}

resource nodesOnWorkspaceStorage 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspaceStorage.id, nodesPrincipalId, 'writes blobs')
  scope: workspaceStorage
  properties: {
    principalId: nodesPrincipalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: writesBlobs.id
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
