// A key vault: roles instead of access policies, the internet is refused, deleted secrets can be restored.
@maxLength(24)
param name string
param location string

@description('Whether it is the workspace that uses it: see storage.bicep.')
param ofWorkspace bool

resource vault 'Microsoft.KeyVault/vaults@2023-07-01' = {
  name: name
  location: location
  properties: {
    tenantId: subscription().tenantId
    sku: {
      family: 'A'
      name: 'standard'
    }
    enableRbacAuthorization: true
    enableSoftDelete: true
    enablePurgeProtection: true
    softDeleteRetentionInDays: 90
    publicNetworkAccess: ofWorkspace ? 'Enabled' : 'Disabled'
    networkAcls: {
      bypass: 'AzureServices'
      defaultAction: 'Deny'
    }
  }
}

output id string = vault.id
output name string = vault.name
