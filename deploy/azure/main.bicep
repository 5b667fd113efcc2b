// Everything that dtrain needs on Azure but computes and endpoints, which it makes, and ends, itself.
// One resource group of its own; nothing in it is reached from the internet, and nothing in it has a key that a person holds.
// Roles and rules are explained in README.md. Deploy: see there.
targetScope = 'resourceGroup'

@description('Prefix of all names: 3 to 7 lower-case letters and digits, first a letter.')
@minLength(3)
@maxLength(7)
param prefix string

@description('Where everything is. The price, the quota and the GPUs that can be had depend on it.')
param location string = resourceGroup().location

@description('Blob container of datasets, run directories and checkpoints.')
param containerName string = 'dtrain'

@description('Address ranges of the virtual network and of its subnets.')
param addresses object = {
  network: '10.40.0.0/16'
  nodes: '10.40.0.0/20'
  endpoints: '10.40.16.0/24'
  orchestrator: '10.40.17.0/24'
}

@description('Days for which deleted and overwritten blobs can be brought back.')
@minValue(7)
@maxValue(365)
param retentionDays int = 14

@description('Most that the resource group should cost in a month, in the currency of the subscription.')
@minValue(1)
param monthlyBudget int

@description('Who is told when the budget runs out.')
@minLength(1)
param budgetEmails array

@description('First day of the month in which the budget begins.')
param budgetStart string = utcNow('yyyy-MM-01')

module identities 'modules/identities.bicep' = {
  name: 'identities'
  params: {
    prefix: prefix
    location: location
  }
}

module network 'modules/network.bicep' = {
  name: 'network'
  params: {
    prefix: prefix
    location: location
    addresses: addresses
  }
}

// What trainings read and write. Apart from the workspace's own storage, so that nodes of one never need all of the other.
module dataStorage 'modules/storage.bicep' = {
  name: 'data-storage'
  params: {
    name: '${prefix}data${uniqueString(resourceGroup().id)}'
    location: location
    containerName: containerName
    retentionDays: retentionDays
    versioning: true
  }
}

// Code, logs and models, in containers that the workspace makes itself.
module workspaceStorage 'modules/storage.bicep' = {
  name: 'workspace-storage'
  params: {
    name: '${prefix}ws${uniqueString(resourceGroup().id)}'
    location: location
    containerName: ''
    retentionDays: retentionDays
    versioning: false
  }
}

// Settings name secrets in here as keyvault://<name>/<secret>.
module settingsVault 'modules/vault.bicep' = {
  name: 'settings-vault'
  params: {
    name: '${prefix}-s-${uniqueString(resourceGroup().id)}'
    location: location
  }
}

// What the workspace keeps for itself. Nobody here has a role on it.
module workspaceVault 'modules/vault.bicep' = {
  name: 'workspace-vault'
  params: {
    name: '${prefix}-w-${uniqueString(resourceGroup().id)}'
    location: location
  }
}

module images 'modules/images.bicep' = {
  name: 'images'
  params: {
    name: '${prefix}${uniqueString(resourceGroup().id)}'
    location: location
  }
}

module workspace 'modules/workspace.bicep' = {
  name: 'workspace'
  params: {
    name: '${prefix}-ml'
    location: location
    storageId: workspaceStorage.outputs.id
    vaultId: workspaceVault.outputs.id
    registryId: images.outputs.id
  }
}

module privateEndpoints 'modules/private_endpoints.bicep' = {
  name: 'private-endpoints'
  params: {
    prefix: prefix
    location: location
    networkId: network.outputs.networkId
    subnetId: network.outputs.endpointsSubnetId
    dataStorageId: dataStorage.outputs.id
    workspaceStorageId: workspaceStorage.outputs.id
    settingsVaultId: settingsVault.outputs.id
    workspaceVaultId: workspaceVault.outputs.id
    registryId: images.outputs.id
    workspaceId: workspace.outputs.id
  }
}

module roles 'modules/roles.bicep' = {
  name: 'roles'
  params: {
    prefix: prefix
    containerName: containerName
    dataStorageName: dataStorage.outputs.name
    workspaceStorageName: workspaceStorage.outputs.name
    settingsVaultName: settingsVault.outputs.name
    registryName: images.outputs.name
    workspaceName: workspace.outputs.name
    networkName: network.outputs.networkName
    nodesSubnetName: network.outputs.nodesSubnetName
    orchestratorPrincipalId: identities.outputs.orchestratorPrincipalId
    nodesPrincipalId: identities.outputs.nodesPrincipalId
    servingPrincipalId: identities.outputs.servingPrincipalId
    nodesIdentityName: identities.outputs.nodesName
    servingIdentityName: identities.outputs.servingName
  }
}

module locationRole 'modules/location_role.bicep' = {
  name: '${prefix}-location-role'
  scope: subscription()
  params: {
    prefix: prefix
    orchestratorPrincipalId: identities.outputs.orchestratorPrincipalId
  }
}

module budget 'modules/budget.bicep' = {
  name: 'budget'
  params: {
    name: '${prefix}-monthly'
    amount: monthlyBudget
    emails: budgetEmails
    start: budgetStart
  }
}

output DTRAIN_AZURE_SUBSCRIPTION_ID string = subscription().subscriptionId
output DTRAIN_AZURE_RESOURCE_GROUP string = resourceGroup().name
output DTRAIN_AZURE_WORKSPACE string = workspace.outputs.name
output DTRAIN_STORAGE string = 'az://${containerName}'
output AZURE_STORAGE_ACCOUNT_URL string = dataStorage.outputs.blobUrl
output orchestratorClientId string = identities.outputs.orchestratorClientId
output nodesIdentityId string = identities.outputs.nodesId
output nodesClientId string = identities.outputs.nodesClientId
output servingIdentityId string = identities.outputs.servingId
output networkName string = network.outputs.networkName
output nodesSubnetId string = network.outputs.nodesSubnetId
output orchestratorSubnetId string = network.outputs.orchestratorSubnetId
output imageServer string = images.outputs.loginServer
output settingsVault string = settingsVault.outputs.name
