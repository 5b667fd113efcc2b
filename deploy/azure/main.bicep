// Everything that dtrain needs on Azure, except computes and endpoints, which dtrain creates and deletes itself.
// It goes into one resource group of its own. The internet reaches nothing in it, and no person holds a key.
// README.md explains the roles and rules, and how to deploy.
targetScope = 'resourceGroup'

@description('Prefix of all names: 3 to 7 lower-case letters and digits, beginning with a letter.')
@minLength(3)
@maxLength(7)
param prefix string

@description('Region of all resources. Prices, quotas and available GPUs depend on it.')
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

@description('Days for which deleted and overwritten blobs can be restored.')
@minValue(7)
@maxValue(365)
param retentionDays int = 14

@description('Regions, among those with GPUs and known prices, that have no availability zones, and so no ZRS.')
param regionsWithoutZones array = [
  'northcentralus'
  'westus'
]

@description('How storage is copied: in three zones of the region, or, where it has none, three times in one place.')
@allowed([
  'Standard_LRS'
  'Standard_ZRS'
])
param storageSku string = contains(regionsWithoutZones, toLower(replace(location, ' ', ''))) ? 'Standard_LRS' : 'Standard_ZRS'

@description('Gigabytes of telemetry that Application Insights takes in on one day at most.')
@minValue(1)
param telemetryGigabytesPerDay int = 1

@description('Whether to make the role on the subscription too. False: somebody who may does it, with modules/location_role.bicep.')
param withLocationRole bool = true

@description('Highest cost of the resource group in a month, in the currency of the subscription.')
@minValue(1)
param monthlyBudget int

@description('Mail addresses that are notified when the budget runs out.')
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

// Data of trainings, separate from the workspace's own storage, so that roles on one give no access to the other.
module dataStorage 'modules/storage.bicep' = {
  name: 'data-storage'
  params: {
    name: '${prefix}data${uniqueString(resourceGroup().id)}'
    location: location
    sku: storageSku
    ofWorkspace: false
    containerName: containerName
    retentionDays: retentionDays
    versioning: true
  }
}

// Code, logs and models, in containers that the workspace creates itself.
module workspaceStorage 'modules/storage.bicep' = {
  name: 'workspace-storage'
  params: {
    name: '${prefix}ws${uniqueString(resourceGroup().id)}'
    location: location
    sku: storageSku
    ofWorkspace: true
    containerName: ''
    retentionDays: retentionDays
    versioning: false
  }
}

// Secrets of settings, which name them as keyvault://<name>/<secret>.
module settingsVault 'modules/vault.bicep' = {
  name: 'settings-vault'
  params: {
    name: '${prefix}-s-${uniqueString(resourceGroup().id)}'
    location: location
    ofWorkspace: false
  }
}

// The workspace's own secrets. No identity here has a role on it.
module workspaceVault 'modules/vault.bicep' = {
  name: 'workspace-vault'
  params: {
    name: '${prefix}-w-${uniqueString(resourceGroup().id)}'
    location: location
    ofWorkspace: true
  }
}

module images 'modules/images.bicep' = {
  name: 'images'
  params: {
    name: '${prefix}${uniqueString(resourceGroup().id)}'
    location: location
  }
}

// Azure ML refuses to make a workspace without it.
module insights 'modules/insights.bicep' = {
  name: 'insights'
  params: {
    name: '${prefix}-insights'
    location: location
    dailyGigabytes: telemetryGigabytesPerDay
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
    insightsId: insights.outputs.id
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

module locationRole 'modules/location_role.bicep' = if (withLocationRole) {
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
output orchestratorPrincipalId string = identities.outputs.orchestratorPrincipalId
output orchestratorClientId string = identities.outputs.orchestratorClientId
output nodesIdentityId string = identities.outputs.nodesId
output nodesClientId string = identities.outputs.nodesClientId
output servingIdentityId string = identities.outputs.servingId
output networkName string = network.outputs.networkName
output nodesSubnetId string = network.outputs.nodesSubnetId
output orchestratorSubnetId string = network.outputs.orchestratorSubnetId
output imageServer string = images.outputs.loginServer
output settingsVault string = settingsVault.outputs.name
