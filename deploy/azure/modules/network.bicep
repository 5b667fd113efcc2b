// One network with three subnets: nodes, private endpoints, orchestrator. Nodes have no public addresses; they
// reach the internet through a NAT gateway, and only the services that are named here.
param prefix string
param location string
param addresses object

resource nodesRules 'Microsoft.Network/networkSecurityGroups@2024-05-01' = {
  name: '${prefix}-nodes'
  location: location
  properties: {
    securityRules: [
      {
        name: 'between-nodes'
        properties: {
          description: 'Ranks reach each other on ports that the system picks; the trainer encrypts between them.'
          priority: 100
          direction: 'Inbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: addresses.nodes
          destinationPortRange: '1024-65535'
        }
      }
      {
        name: 'nobody-else-in'
        properties: {
          description: 'Neither the internet nor the rest of the network: no other host has to call a node.'
          priority: 4096
          direction: 'Inbound'
          access: 'Deny'
          protocol: '*'
          sourceAddressPrefix: '*'
          sourcePortRange: '*'
          destinationAddressPrefix: '*'
          destinationPortRange: '*'
        }
      }
      {
        name: 'to-other-nodes'
        properties: {
          priority: 100
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: addresses.nodes
          destinationPortRange: '1024-65535'
        }
      }
      {
        name: 'to-private-endpoints'
        properties: {
          description: 'Storage, images, the workspace.'
          priority: 110
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: addresses.endpoints
          destinationPortRange: '443'
        }
      }
      {
        name: 'to-azure-machine-learning'
        properties: {
          priority: 120
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'AzureMachineLearning'
          destinationPortRanges: [
            '443'
            '8787'
            '18881'
          ]
        }
      }
      {
        name: 'to-azure-machine-learning-udp'
        properties: {
          priority: 130
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Udp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'AzureMachineLearning'
          destinationPortRange: '5831'
        }
      }
      {
        name: 'to-batch'
        properties: {
          description: 'Azure ML manages nodes through it.'
          priority: 140
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'BatchNodeManagement.${location}'
          destinationPortRange: '443'
        }
      }
      {
        name: 'to-entra'
        properties: {
          description: 'Tokens.'
          priority: 150
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'AzureActiveDirectory'
          destinationPortRange: '443'
        }
      }
      {
        name: 'to-resource-manager'
        properties: {
          priority: 160
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'AzureResourceManager'
          destinationPortRange: '443'
        }
      }
      {
        name: 'to-storage-of-the-service'
        properties: {
          description: 'Azure ML\'s own accounts. Data can leave to any account of the region; a service endpoint policy prevents that.'
          priority: 170
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'Storage.${location}'
          destinationPortRange: '443'
        }
      }
      {
        name: 'to-microsofts-images'
        properties: {
          priority: 180
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'MicrosoftContainerRegistry'
          destinationPortRange: '443'
        }
      }
      {
        name: 'to-front-door'
        properties: {
          description: 'Delivers Microsoft\'s images.'
          priority: 190
          direction: 'Outbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefix: addresses.nodes
          sourcePortRange: '*'
          destinationAddressPrefix: 'AzureFrontDoor.FirstParty'
          destinationPortRange: '443'
        }
      }
      {
        name: 'nowhere-else'
        properties: {
          priority: 4096
          direction: 'Outbound'
          access: 'Deny'
          protocol: '*'
          sourceAddressPrefix: '*'
          sourcePortRange: '*'
          destinationAddressPrefix: '*'
          destinationPortRange: '*'
        }
      }
    ]
  }
}

resource endpointsRules 'Microsoft.Network/networkSecurityGroups@2024-05-01' = {
  name: '${prefix}-endpoints'
  location: location
  properties: {
    securityRules: [
      {
        name: 'from-nodes-and-orchestrator'
        properties: {
          priority: 100
          direction: 'Inbound'
          access: 'Allow'
          protocol: 'Tcp'
          sourceAddressPrefixes: [
            addresses.nodes
            addresses.orchestrator
          ]
          sourcePortRange: '*'
          destinationAddressPrefix: addresses.endpoints
          destinationPortRange: '443'
        }
      }
      {
        name: 'nobody-else-in'
        properties: {
          priority: 4096
          direction: 'Inbound'
          access: 'Deny'
          protocol: '*'
          sourceAddressPrefix: '*'
          sourcePortRange: '*'
          destinationAddressPrefix: '*'
          destinationPortRange: '*'
        }
      }
    ]
  }
}

resource orchestratorRules 'Microsoft.Network/networkSecurityGroups@2024-05-01' = {
  name: '${prefix}-orchestrator'
  location: location
  properties: {
    securityRules: [
      {
        name: 'nobody-in'
        properties: {
          description: 'People reach Dagster\'s UI through Bastion or a VPN; add a rule for it.'
          priority: 4096
          direction: 'Inbound'
          access: 'Deny'
          protocol: '*'
          sourceAddressPrefix: '*'
          sourcePortRange: '*'
          destinationAddressPrefix: '*'
          destinationPortRange: '*'
        }
      }
    ]
  }
}

resource outAddress 'Microsoft.Network/publicIPAddresses@2024-05-01' = {
  name: '${prefix}-out'
  location: location
  sku: {
    name: 'Standard'
  }
  properties: {
    publicIPAllocationMethod: 'Static'
  }
}

resource out 'Microsoft.Network/natGateways@2024-05-01' = {
  name: '${prefix}-out'
  location: location
  sku: {
    name: 'Standard'
  }
  properties: {
    publicIpAddresses: [
      {
        id: outAddress.id
      }
    ]
  }
}

resource network 'Microsoft.Network/virtualNetworks@2024-05-01' = {
  name: '${prefix}-network'
  location: location
  properties: {
    addressSpace: {
      addressPrefixes: [
        addresses.network
      ]
    }
    subnets: [
      {
        name: 'nodes'
        properties: {
          addressPrefix: addresses.nodes
          defaultOutboundAccess: false
          natGateway: {
            id: out.id
          }
          networkSecurityGroup: {
            id: nodesRules.id
          }
        }
      }
      {
        name: 'endpoints'
        properties: {
          addressPrefix: addresses.endpoints
          defaultOutboundAccess: false
          privateEndpointNetworkPolicies: 'NetworkSecurityGroupEnabled'
          networkSecurityGroup: {
            id: endpointsRules.id
          }
        }
      }
      {
        name: 'orchestrator'
        properties: {
          addressPrefix: addresses.orchestrator
          defaultOutboundAccess: false
          natGateway: {
            id: out.id
          }
          networkSecurityGroup: {
            id: orchestratorRules.id
          }
        }
      }
    ]
  }
}

output networkId string = network.id
output networkName string = network.name
output nodesSubnetName string = 'nodes'
output nodesSubnetId string = '${network.id}/subnets/nodes'
output endpointsSubnetId string = '${network.id}/subnets/endpoints'
output orchestratorSubnetId string = '${network.id}/subnets/orchestrator'
