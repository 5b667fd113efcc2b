// Private addresses and DNS names, inside the network, of all resources that are closed to the internet.
param prefix string
param location string
param networkId string
param subnetId string
param dataStorageId string
param workspaceStorageId string
param settingsVaultId string
param workspaceVaultId string
param registryId string
param workspaceId string

var zoneNames = {
  blob: 'privatelink.blob.${environment().suffixes.storage}'
  file: 'privatelink.file.${environment().suffixes.storage}'
  vault: 'privatelink.vaultcore.azure.net'
  registry: 'privatelink.azurecr.io'
  amlworkspace: 'privatelink.api.azureml.ms'
  notebooks: 'privatelink.notebooks.azure.net'
}

var targets = [
  { name: 'data-blob', id: dataStorageId, group: 'blob', zones: [ 'blob' ] }
  { name: 'workspace-blob', id: workspaceStorageId, group: 'blob', zones: [ 'blob' ] }
  { name: 'workspace-file', id: workspaceStorageId, group: 'file', zones: [ 'file' ] }
  { name: 'settings-vault', id: settingsVaultId, group: 'vault', zones: [ 'vault' ] }
  { name: 'workspace-vault', id: workspaceVaultId, group: 'vault', zones: [ 'vault' ] }
  { name: 'images', id: registryId, group: 'registry', zones: [ 'registry' ] }
  { name: 'workspace', id: workspaceId, group: 'amlworkspace', zones: [ 'amlworkspace', 'notebooks' ] }
]

resource zones 'Microsoft.Network/privateDnsZones@2020-06-01' = [for zone in items(zoneNames): {
  name: zone.value
  location: 'global'
}]

resource links 'Microsoft.Network/privateDnsZones/virtualNetworkLinks@2020-06-01' = [for (zone, index) in items(zoneNames): {
  parent: zones[index]
  name: '${prefix}-network'
  location: 'global'
  properties: {
    registrationEnabled: false
    virtualNetwork: {
      id: networkId
    }
  }
}]

resource endpoints 'Microsoft.Network/privateEndpoints@2024-05-01' = [for target in targets: {
  name: '${prefix}-${target.name}'
  location: location
  properties: {
    subnet: {
      id: subnetId
    }
    privateLinkServiceConnections: [
      {
        name: target.name
        properties: {
          privateLinkServiceId: target.id
          groupIds: [
            target.group
          ]
        }
      }
    ]
  }
}]

resource names 'Microsoft.Network/privateEndpoints/privateDnsZoneGroups@2024-05-01' = [for (target, index) in targets: {
  parent: endpoints[index]
  name: 'default'
  properties: {
    privateDnsZoneConfigs: [for zone in target.zones: {
      name: zone
      properties: {
        privateDnsZoneId: resourceId('Microsoft.Network/privateDnsZones', zoneNames[zone])
      }
    }]
  }
  dependsOn: [
    zones
    links
  ]
}]
