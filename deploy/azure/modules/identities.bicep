// Three identities, each with permissions that the others do not have. roles.bicep has the permissions.
param prefix string
param location string

resource orchestrator 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${prefix}-orchestrator'
  location: location
}

resource nodes 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${prefix}-nodes'
  location: location
}

resource serving 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${prefix}-serving'
  location: location
}

output orchestratorPrincipalId string = orchestrator.properties.principalId
output orchestratorClientId string = orchestrator.properties.clientId
output nodesPrincipalId string = nodes.properties.principalId
output nodesClientId string = nodes.properties.clientId
output nodesId string = nodes.id
output nodesName string = nodes.name
output servingPrincipalId string = serving.properties.principalId
output servingId string = serving.id
output servingName string = serving.name
